"""Draws the parts of the grid that contain findings, with a mark at each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir import grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.ir.grid import Mark
    from penstock.ir.schedule import Schedule
    from penstock.verification.findings import Finding

#: The number of steps and ranks that fit a terminal.
STEPS: Final = 14
RANKS: Final = 12
#: No more ranks than this are shown, even if a finding spans more.
MOST_RANKS: Final = 48
#: More windows would not be read.
MOST_WINDOWS: Final = 3


class Window(NamedTuple):
    """A part of the grid."""

    ranks: range
    steps: range

    def shows(self, mark: Mark) -> bool:
        """Return whether the marked step is in the window."""
        return mark[0] in self.ranks and mark[1] in self.steps


def draw_findings(schedule: Schedule, findings: Sequence[Finding], width: int | None = None) -> str:
    """Draw the grid as written: all of it if it is small, otherwise windows around the first few marks.

    Args:
        schedule: the schedule.
        findings: what is wrong with it.
        width: the number of columns to fold the drawing to.
    """
    length = schedule.steps
    windows: list[Window] = []
    for finding in findings:
        for mark in finding.marks:
            if len(windows) < MOST_WINDOWS and not any(window.shows(mark) for window in windows):
                windows.append(_around_mark(schedule.ranks, length, finding, mark))
    windows = windows or [Window(_around(0, schedule.ranks, RANKS), _around(0, length, STEPS))]
    marks = [mark for finding in findings for mark in finding.marks]
    return "\n\n".join(_drawn(schedule, length, window, marks, width) for window in windows)


def _around_mark(ranks: int, steps: int, finding: Finding, mark: Mark) -> Window:
    """Return a window that shows the mark and, if possible, the other marks of the finding in these steps."""
    shown = _around(mark[1], steps, STEPS)
    others = [rank for rank, step in finding.marks if step in shown]
    low, high = min(others), max(others)
    if high - low >= MOST_RANKS:
        return Window(_around(mark[0], ranks, MOST_RANKS), shown)
    return Window(_around((low + high + 1) // 2, ranks, max(RANKS, high - low + 1)), shown)


def _around(position: int, total: int, size: int) -> range:
    start = max(0, min(position - size // 2, total - size))
    return range(start, min(total, start + size))


def _drawn(schedule: Schedule, length: int, window: Window, marks: Sequence[Mark], width: int | None) -> str:
    """Draw the window with its marks; if it does not show everything, a line above says what it shows."""
    shown = [mark for mark in marks if window.shows(mark)]
    drawn = grid.draw(schedule, aligned=False, mark=shown or None, ranks=window.ranks, steps=window.steps, width=width)
    parts = [
        f"{noun} {part[0]} to {part[-1]} of {total}"
        for noun, part, total in (("steps", window.steps, length), ("ranks", window.ranks, schedule.ranks))
        if len(part) < total
    ]
    return f"# {', '.join(parts)}\n{drawn}" if parts else drawn
