"""Proof that a schedule will run: complete, ordered, free of deadlock, within memory; or what is wrong, and where."""
