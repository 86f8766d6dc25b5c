"""Builds the event graph of a schedule, what happens and what waits for what, as arrays, and walks through it."""
