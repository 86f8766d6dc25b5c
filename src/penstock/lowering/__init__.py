"""Lowers a compute schedule to one that can run: one pass per file, each from a schedule to a new one."""
