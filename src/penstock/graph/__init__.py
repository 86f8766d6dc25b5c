"""The event graph of a schedule: what happens, and what waits for what, as arrays; and the walk through it."""
