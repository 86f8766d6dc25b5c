"""Proves that a schedule will run: complete, ordered, free of deadlock, within memory; or reports what is wrong."""
