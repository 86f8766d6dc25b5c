"""Chooses a schedule and a partition for given costs and memory limits, and bounds how far it is from optimal."""
