"""The grid as a file: what ``Schedule.grid(aligned=False)`` draws, or a person types."""

from __future__ import annotations

from penstock.ir.formats.rows import check_rows_tell_all
from penstock.ir.schedule import Schedule


def schedule_from_grid(text: str) -> Schedule:
    """Read a grid."""
    return Schedule.from_text(text)


def grid_from_schedule(schedule: Schedule) -> str:
    """The grid as written, not aligned."""
    check_rows_tell_all(schedule, "a text grid")
    return schedule.grid(aligned=False) + "\n"
