"""Moves tensors between ranks, and reports the failure of one to all: on processes, or on threads."""
