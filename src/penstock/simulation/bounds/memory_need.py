"""Computes the smallest memory limits with which there is any schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.simulation.bounds.memory_order import ROUNDING, held_at_once

if TYPE_CHECKING:
    from penstock.simulation.problem import Problem


class MemoryNeed(NamedTuple):
    """The memory without which there is no schedule.

    Attributes:
        of_ranks: for each rank, static memory included.
        rank: the rank whose need exceeds its limit by most, or comes closest to it.
    """

    of_ranks: tuple[float, ...]
    rank: int

    @property
    def single(self) -> float:
        """The smallest limit if it is the same for all ranks."""
        return max(self.of_ranks)


def smallest_memory_limit(problem: Problem) -> MemoryNeed:
    """Return for each rank the memory limit below which no schedule exists: static memory and one activation per stage.

    In a chain no lower limit is possible: when the last stage of a rank runs its first F, none of its stages has run an
    I, because each waits for that of the last stage. So each holds the activation of that microbatch. And no higher
    limit is needed: run one microbatch at a time. With other edges, a stage only counts if it holds its activation at
    that time in any case; then a schedule may need more than this.

    >>> from penstock.ir.placement import Placement
    >>> from penstock.simulation.costs import Costs
    >>> from penstock.simulation.problem import Problem
    >>> smallest_memory_limit(Problem.of(Costs(activation=2, static=3), Placement.v(2, 3), microbatches=4))
    MemoryNeed(of_ranks=(5.0, 10.0), rank=1)
    """
    needed = problem.static + held_at_once(problem)
    missing = needed - problem.memory_limit if np.isfinite(problem.memory_limit).any() else needed
    return MemoryNeed(tuple(needed.tolist()), int(missing.argmax()))


def exceeds_limit(problem: Problem) -> bool:
    """Return whether some rank has less memory than it needs."""
    return bool((held_at_once(problem) > problem.budget + ROUNDING * np.abs(problem.budget)).any())
