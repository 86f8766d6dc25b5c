"""Predicts the time and the memory that a schedule takes, and where they go."""
