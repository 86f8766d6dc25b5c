"""Proves lower bounds for a problem: what no schedule of its stages on its ranks goes below.

Times are those of ``simulate``, whose makespan and span end with the last action of a rank, before the optimizer:

- The *makespan* is the time from the first start to the last end.
- The *span* is the longest window of a rank, from its first start to its last end, if all actions run in order and as
  soon as they can.
- The *period* is the time per step if steps follow each other on every rank without a barrier: with D[r, q], the
  longest path from the start of the first action of rank r to the end of the last one of rank q, it is the largest mean
  of D around a cycle of ranks. It is also the shortest time into which the windows of all ranks fit if each of them may
  delay its first action. As in ``steady_period``, the optimizer counts, and the dispatch of the next step. Without
  these two, it is at most the span, and a bound on it is one on the span.

A bound holds for every schedule with these microbatches on this placement within the memory limits, whether or not it
fuses backwards or overlaps them with forwards. Values that wait to be used (``edge_memory``) are not counted. Bounds
are exact up to rounding: a value may be lower by a billionth.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import ScheduleError
from penstock.simulation.bounds.bound import Bound, Bounds
from penstock.simulation.bounds.makespan import makespan_bounds
from penstock.simulation.bounds.memory_need import MemoryNeed, exceeds_limit, smallest_memory_limit
from penstock.simulation.bounds.period import period_bounds
from penstock.simulation.bounds.relaxation import relax

if TYPE_CHECKING:
    from penstock.simulation.problem import Problem

__all__ = ["OBJECTIVES", "Bound", "Bounds", "MemoryNeed", "lower_bounds", "smallest_memory_limit"]

#: What can be bounded.
OBJECTIVES: Final = ("makespan", "span", "period")


def lower_bounds(problem: Problem, objective: str = "makespan") -> Bounds:
    """Return what no schedule of the problem goes below, by several arguments.

    >>> from penstock.ir.placement import Placement
    >>> from penstock.simulation.costs import Costs
    >>> from penstock.simulation.problem import Problem
    >>> problem = Problem.of(Costs(), Placement.loop(4, 4), microbatches=8, memory_limit=4)
    >>> lower_bounds(problem).best, lower_bounds(problem).rank
    (27.0, 3)
    """
    if objective not in OBJECTIVES:
        raise ScheduleError(f"unknown objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    if exceeds_limit(problem):
        need = smallest_memory_limit(problem)
        words = (
            f"no schedule fits into the memory of rank {need.rank}, which needs at least {need.of_ranks[need.rank]:g}"
        )
        return Bounds(objective, (Bound("memory", math.inf, need.rank, words),))
    relaxed = relax(problem)
    if (rank := relaxed.impossible_rank) is not None:
        words = f"no schedule fits into the memory limits: an action of rank {rank} would have to wait for itself"
        return Bounds(objective, (Bound("memory", math.inf, rank, words),))
    if objective == "makespan":
        return Bounds(objective, tuple(makespan_bounds(problem, relaxed)))
    after = np.zeros(problem.ranks)
    if objective == "period":
        optimizer = problem.costs.per_stage("optimizer", problem.stages)
        after += problem.dispatch + np.bincount(problem.rank_of, optimizer, problem.ranks)
    return Bounds(objective, tuple(period_bounds(problem, relaxed, after)))
