"""Reads and writes the text grid: what ``Schedule.grid(aligned=False)`` draws, or a person types."""

from __future__ import annotations

from penstock.ir import grid
from penstock.ir.formats.rows import check_not_truncated, check_rows_suffice
from penstock.ir.schedule import Schedule


def schedule_from_grid(text: str) -> Schedule:
    """Read a grid. The last row may lack a line break if it is complete."""
    schedule = Schedule.from_text(text)
    check_not_truncated(schedule, text)
    return schedule


def grid_from_schedule(schedule: Schedule) -> str:
    """Return the grid as written, not aligned, after a line with its edges if they are not a chain."""
    check_rows_suffice(schedule, "a text grid")
    edges = "" if schedule.is_chain else grid.edges_line(schedule.edges) + "\n"
    return edges + schedule.grid(aligned=False) + "\n"
