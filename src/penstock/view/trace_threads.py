"""Defines the threads of a rank in a trace: what it runs, and one or more lanes for each peer."""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPUTE, INSTANTS, IDLE, LANE = range(4)

_NAMES = {COMPUTE: "compute", INSTANTS: "instants", IDLE: "idle"}


class Thread(NamedTuple):
    """A thread of a rank in a trace, on which bars do not overlap. Threads sort in display order.

    Attributes:
        rank: the rank.
        subject: ``COMPUTE``, ``INSTANTS`` for actions that take no time, ``IDLE`` or ``LANE``.
        peer: for a lane, the rank at the other end.
        receives: whether it shows receives from that rank.
        number: the index among several lanes in parallel.
    """

    rank: int
    subject: int
    peer: int = 0
    receives: bool = False
    number: int = 0

    def __str__(self) -> str:
        if self.subject != LANE:
            return _NAMES[self.subject]
        # In brackets: readers append the number of the thread to its name, which would look like another rank.
        lane = f", lane {self.number + 1}" if self.number else ""
        return f"receive (from rank {self.peer}{lane})" if self.receives else f"send (to rank {self.peer}{lane})"


def assign_lanes(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Assign lanes to spans of (start, end), so that spans in a lane neither overlap nor begin together. O(n log n).

    Readers would nest a span that takes no time inside another that begins with it, and attach its arrows wrongly.

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
