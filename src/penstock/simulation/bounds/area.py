"""Bounds the time of a rank by the room that activations need: memory times time.

Every activation is held at least for as long as the longest chain of waits from its F to its release. The sum of these
areas has to fit below the memory limit, and below what the rank can hold that early and that late: an F counts from its
head on, and an activation has to be released by an operation that ends after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.simulation.bounds.heads import path_heads
from penstock.simulation.bounds.memory_order import ROUNDING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.bounds.relaxation import Relaxation
    from penstock.simulation.problem import Problem

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

#: Bisection ends when the interval is this share of the bound.
_PRECISION: Final = 1e-12


def held_area(problem: Problem, relaxed: Relaxation) -> Floats:
    """Return for each rank at least how much memory its activations hold for how long: the sum of the products."""
    stages = problem.stages
    area = np.zeros(problem.ranks)
    for stage in range(stages):
        release = np.full((3 * stages, 1), -np.inf)
        release[stage] = 0.0
        until = path_heads(relaxed, release)[:, 0] + relaxed.taken - relaxed.trailing
        held = problem.input_release[stage] * until[stages + stage]
        held += problem.weight_release[stage] * until[2 * stages + stage]
        area[problem.rank_of[stage]] += problem.microbatches * held
    return area


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for activations that a rank can hold at a time after the beginning and before the end.

    Attributes:
        limit: what it can hold at any time.
        rising: when the first activations can be there, in ascending order, and how much that is before and after each.
        falling: the same with time running backwards.
    """

    limit: float
    rising: tuple[Floats, Floats]
    falling: tuple[Floats, Floats]

    @classmethod
    def of(cls, problem: Problem, relaxed: Relaxation, heads: Floats, tails: Floats, rank: int) -> Room:
        """Return the room of a rank whose operations have these heads and tails."""
        here = np.flatnonzero(problem.rank_of == rank)
        forward, inward, weight = here, problem.stages + here, 2 * problem.stages + here
        rising = _staircase(heads[forward], problem.activation[here])
        released = np.concatenate([problem.input_release[here], problem.weight_release[here]])
        falling = _staircase(tails[np.concatenate([inward, weight])] + relaxed.trailing, released)
        return cls(_usable(float(problem.budget[rank]), released), rising, falling)

    def area(self, end: float) -> float:
        """Return the room until ``end``."""
        (early, risen), (late, fallen) = self.rising, self.falling
        times = np.clip(np.concatenate([[0.0, end], early, end - late]), 0.0, end)
        times.sort()
        middle = (times[1:] + times[:-1]) / 2
        upto = risen[np.searchsorted(early, middle, side="right")]
        left = fallen[np.searchsorted(late, end - middle, side="right")]
        return float((np.minimum(np.minimum(upto, left), self.limit) * np.diff(times)).sum())

    def end_for(self, needed: float, known: float) -> float:
        """Return the earliest end with this much room, rounded down; -inf if there is as much until ``known``."""
        needed *= 1 - ROUNDING
        if self.area(known) >= needed:
            return -np.inf
        low, high = known, max(1.0, 2 * known)
        while self.area(high) < needed:
            low, high = high, 2 * high
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.area(middle) < needed else (low, middle)
        return low


def _staircase(times: Floats, steps: Floats) -> tuple[Floats, Floats]:
    """Return when amounts join, in ascending order, and the sum before the first and after each of them."""
    flat = np.maximum(times, 0.0).ravel()
    order = np.argsort(flat, kind="stable")
    amounts = np.repeat(steps, times.shape[1])[order]
    return flat[order], np.append(0.0, np.cumsum(amounts))


def _usable(budget: float, released: Floats) -> float:
    """Return the most memory that can be held: if all amounts are multiples of the smallest, a multiple of it too."""
    amounts = released[released > ROUNDING * budget]
    if not len(amounts) or len(amounts) < (released > 0).sum():
        return budget
    counts = amounts / amounts.min()
    if np.abs(counts - np.round(counts)).max() > ROUNDING:
        return budget
    return float(min(budget, np.floor(budget / amounts.min() * (1 + ROUNDING)) * amounts.min() * (1 + ROUNDING)))
