"""Bounds the period, and thereby the span."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.simulation.bounds.area import held_area
from penstock.simulation.bounds.bound import Bound
from penstock.simulation.bounds.relaxation import relax
from penstock.simulation.bounds.window import Window, rounds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.bounds.relaxation import Relaxation
    from penstock.simulation.problem import Problem

    Floats = NDArray[np.float64]

_WORDS: Final = {
    "work": "the window of rank {} has to hold the work of rank {rank} and what precedes and follows it",
    "path": "the window of rank {} has to hold the longest chain of waits for inputs",
    "memory": "the window of rank {} has to hold the longest chain of waits for inputs and memory",
    "machine": "in the window of rank {}, rank {rank} runs one operation at a time, as inputs and memory allow",
    "area": "in the window of rank {}, each activation takes memory for some time, and all have to fit below the limit",
}


#: How many operations the windows that are tried may have in all; if there are too many, some ranks are left out.
_MOST_OPERATIONS: Final = 3_000_000


def period_bounds(problem: Problem, relaxed: Relaxation, after: Floats) -> list[Bound]:
    """Return bounds on the longest window of a rank, from its first start to its last end and some time ``after``.

    The window of a rank has to hold all that runs, on any rank, between two of its operations. What every rank runs
    before and after an operation takes longest to find, so in most windows only the rank itself is considered.
    """
    free = relax(replace(problem, memory_limit=np.full(problem.ranks, np.inf)))
    needed = held_area(problem, relaxed)
    best = _Best(relaxed, after)
    tried = []
    for rank in _ranks_to_try(relaxed):
        window = Window.around_rank(free, rank, after[rank])
        best.add("work", rank, window.work_ends())
        best.add("path", rank, window.path_ends())
        window = Window.around_rank(relaxed, rank, after[rank])
        best.add("memory", rank, window.path_ends())
        size = (window.work(), float(window.path_ends().max()))
        window = Window.around_rank(relaxed, rank, after[rank], rounds(relaxed), only=True)
        ends = window.machine_ends(rank)
        best.add("machine", rank, ends)
        best.add("area", rank, window.area_ends(problem, needed, [rank], best.value))
        tried.append((size, float(ends[rank]), rank))
    for rank in {max(tried)[-1], max(tried, key=lambda each: each[1])[-1]} if tried else ():
        window = Window.around_rank(relaxed, rank, after[rank], rounds(relaxed))
        best.add("machine", rank, window.machine_ends())
    return [Bound(name, *best.found[name]) for name in _WORDS]


class _Best:
    """The highest value of each bound, with the rank whose window it comes from, and words."""

    def __init__(self, relaxed: Relaxation, after: Floats) -> None:
        self.found = {name: (0.0, 0, words.format(0, rank=0)) for name, words in _WORDS.items()}
        work = np.bincount(relaxed.rank, relaxed.taken, relaxed.ranks) * relaxed.microbatches
        busiest = int((work + after).argmax())
        own = np.full(relaxed.ranks, -np.inf)
        own[busiest] = work[busiest] + after[busiest] - relaxed.trailing
        self.add("work", busiest, own)

    @property
    def value(self) -> float:
        """The highest value of all."""
        return max(value for value, _, _ in self.found.values())

    def add(self, name: str, window: int, ends: Floats) -> None:
        """Consider the value that each rank gives in the window of a rank."""
        rank = int(ends.argmax())
        if ends[rank] > self.found[name][0]:
            self.found[name] = float(ends[rank]), window, _WORDS[name].format(window, rank=rank)


def _ranks_to_try(relaxed: Relaxation) -> list[int]:
    """Return the ranks with operations, or some of them, from the first to the last."""
    ranks = np.flatnonzero(np.diff(relaxed.members[1]))
    most = max(4, _MOST_OPERATIONS // max(1, len(relaxed.rank) * relaxed.microbatches))
    chosen = np.unique(np.linspace(0, len(ranks) - 1, min(len(ranks), most)).round().astype(np.int64))
    return [int(rank) for rank in ranks[chosen]]
