"""The lines of a rank in a trace: what it does, and a lane for each peer; more where transfers overlap."""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPUTE, INSTANTS, IDLE, LANE = range(4)

_NAMES = {COMPUTE: "compute", INSTANTS: "instants", IDLE: "idle"}


class Thread(NamedTuple):
    """A line of a rank in a trace, on which one thing is drawn after the other. They sort in the order of the lines.

    Attributes:
        rank: the rank.
        subject: ``COMPUTE``, ``INSTANTS`` for actions that take no time, ``IDLE`` or ``LANE``.
        peer: for a lane, the rank at the other end.
        receives: whether it comes from there.
        number: which of several lanes in parallel, from 0.
    """

    rank: int
    subject: int
    peer: int = 0
    receives: bool = False
    number: int = 0

    def __str__(self) -> str:
        if self.subject != LANE:
            return _NAMES[self.subject]
        # In brackets: a reader that puts the number of the thread behind its name must not make another rank of it.
        lane = f", lane {self.number + 1}" if self.number else ""
        return f"receive (from rank {self.peer}{lane})" if self.receives else f"send (to rank {self.peer}{lane})"


def assign_lanes(spans: Iterable[tuple[int, int]]) -> list[int]:
    """A number for each span of (start, end), so that those with the same number do not overlap. O(n log n).

    Nor do they begin at once: readers put what takes no time inside of what begins then, and its arrows go astray.

    >>> assign_lanes([(0, 3), (1, 4), (3, 5), (5, 5), (5, 5)])
    [0, 1, 0, 1, 0]
    """
    spans = list(spans)
    numbers = [0] * len(spans)
    free: list[tuple[int, int]] = []  # when each number is free again
    for place in sorted(range(len(spans)), key=lambda place: spans[place]):
        start, end = spans[place]
        end = max(end, start + 1)
        if free and free[0][0] <= start:
            numbers[place] = free[0][1]
            heapreplace(free, (end, numbers[place]))
        else:
            numbers[place] = len(free)
            heappush(free, (end, numbers[place]))
    return numbers
