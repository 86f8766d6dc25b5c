"""The part of the grid that the findings are in, with a mark at each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.ir.schedule import Schedule
    from penstock.verification.findings import Finding

#: As many steps and ranks as a terminal shows.
STEPS: Final = 14
RANKS: Final = 12


def picture(schedule: Schedule, findings: Sequence[Finding]) -> str:
    """The grid as written around the first finding that has a place; the whole of it if it is small."""
    marks = [mark for finding in findings for mark in finding.marks]
    rank, step = marks[0] if marks else (0, 0)
    last = max((mark[0] for mark in findings[0].marks), default=rank) if findings else rank
    ranks = _around(rank, schedule.ranks, max(RANKS, min(4 * RANKS, abs(last - rank) + 1)))
    steps = _around(step, schedule.steps, STEPS)
    shown = [mark for mark in marks if mark[0] in ranks and mark[1] in steps]
    return schedule.grid(aligned=False, mark=shown or None, ranks=ranks, steps=steps)


def _around(place: int, total: int, size: int) -> range:
    start = max(0, min(place - size // 2, total - size))
    return range(start, min(total, start + size))
