"""Builds every known schedule with a pure function of its sizes, and looks them up by name."""
