"""Bounds the length of a window of time in which operations with heads and tails run, by several arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.simulation.bounds.area import Room
from penstock.simulation.bounds.heads import machine_heads, path_heads
from penstock.simulation.bounds.one_machine import preemptive_ends

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.simulation.bounds.relaxation import Relaxation
    from penstock.simulation.problem import Problem

    Floats = NDArray[np.float64]


#: The most rounds of heads and tails, and the most entries of the tree to fill in them all together.
_MOST_ROUNDS: Final = 100
_MOST_ENTRIES: Final = 5_000_000


def rounds(relaxed: Relaxation) -> int:
    """Return how many rounds of heads and of tails a problem of this size affords: always some."""
    of_ranks = np.diff(relaxed.members[1])
    entries = int((of_ranks**2).sum()) * relaxed.microbatches
    return int(np.clip(_MOST_ENTRIES // max(entries, 1), 3, _MOST_ROUNDS))


class Window(NamedTuple):
    """Operations with, for each microbatch, the time from the beginning to their start, and from their end to the end.

    Attributes:
        relaxed: the operations.
        heads: the least time from the beginning of the window; -inf if the operation may be before it.
        tails: the least time to the end of the window; -inf if the operation may be after it.
    """

    relaxed: Relaxation
    heads: Floats
    tails: Floats

    @classmethod
    def around_all(cls, relaxed: Relaxation, rounds: int = 0) -> Window:
        """Return the window from the first to the last operation; ``rounds`` are those of ``machine_heads``."""
        inside = np.ones(len(relaxed.rank), np.bool_)
        return cls._around(relaxed, inside, -relaxed.trailing, rounds)

    @classmethod
    def around_rank(cls, relaxed: Relaxation, rank: int, after: float, rounds: int = 0, only: bool = False) -> Window:
        """Return the window from the first operation of a rank to ``after`` its last one."""
        return cls._around(relaxed, relaxed.rank == rank, after - relaxed.trailing, rounds, rank if only else None)

    @classmethod
    def _around(
        cls, relaxed: Relaxation, inside: NDArray[np.bool_], after: float, rounds: int, rank: int | None = None
    ) -> Window:
        sides = []
        for side, least in ((relaxed, 0.0), (relaxed.reversed, after)):
            release = np.full((len(inside), relaxed.microbatches), -np.inf)
            release[inside] = least
            sides.append(machine_heads(side, release, rounds, rank) if rounds else path_heads(side, release))
        return cls(relaxed, sides[0], np.ascontiguousarray(sides[1][:, ::-1]))

    def work(self) -> float:
        """Return how long all ranks together run what has to be in the window."""
        inside = np.isfinite(self.heads) & np.isfinite(self.tails)
        return float((inside.sum(axis=1) * self.relaxed.taken).sum())

    def work_ends(self) -> Floats:
        """Return for each rank its work in the window, plus the least time before its first and after its last one."""
        inside = np.isfinite(self.heads) & np.isfinite(self.tails)
        work = np.bincount(self.relaxed.rank, inside.sum(axis=1) * self.relaxed.taken, self.relaxed.ranks)
        return work + self._least(self.heads, inside) + self._least(self.tails, inside)

    def path_ends(self) -> Floats:
        """Return for each rank the longest chain of waits through one of its operations."""
        longest = (self.heads + self.relaxed.taken[:, None] + self.tails).max(axis=1, initial=-np.inf)
        ends = np.full(self.relaxed.ranks, -np.inf)
        np.maximum.at(ends, self.relaxed.rank, longest)
        return ends

    def machine_ends(self, rank: int | None = None) -> Floats:
        """Return for each rank the least time in which it can run its operations between their heads and tails.

        If ``rank`` is given, only for this one, and -inf for the others.
        """
        times = (self.relaxed.taken, self.heads, self.tails)
        if rank is None:
            return preemptive_ends(*times, *self.relaxed.members)
        ends = np.full(self.relaxed.ranks, -np.inf)
        ends[rank] = preemptive_ends(*times, *self.relaxed.members_of(rank))[0]
        return ends

    def area_ends(self, problem: Problem, needed: Floats, ranks: Iterable[int], known: float) -> Floats:
        """Return for each of the ranks the least time in which its activations have room; -inf if that is ``known``."""
        ends = np.full(self.relaxed.ranks, -np.inf)
        for rank in ranks:
            if np.isfinite(problem.budget[rank]):
                room = Room.of(problem, self.relaxed, self.heads, self.tails, rank)
                ends[rank] = room.end_for(needed[rank], known)
        return ends

    def _least(self, times: Floats, inside: NDArray[np.bool_]) -> Floats:
        least = np.full(self.relaxed.ranks, np.inf)
        np.minimum.at(least, self.relaxed.rank, np.where(inside, times, np.inf).min(axis=1, initial=np.inf))
        return np.where(np.isfinite(least), least, 0.0)
