"""Defines what a schedule is: its actions, the placement of stages, their dependencies, and the file formats."""
