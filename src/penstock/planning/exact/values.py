"""Computes what an order is worth: by simulation, which has the last word on every result of the exact search."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ScheduleError
from penstock.planning.exact.units import ROUNDING
from penstock.planning.orders import KINDS, B, F
from penstock.simulation.bounds import OBJECTIVES
from penstock.simulation.period import steady_period
from penstock.simulation.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.planning.orders import Order
    from penstock.simulation.problem import Problem


def check_objective(objective: str) -> None:
    """Raise an error if the objective is unknown."""
    if objective not in OBJECTIVES:
        raise ScheduleError(f"unknown objective {objective!r}; use one of {', '.join(OBJECTIVES)}")


def value_of(problem: Problem, order: Order, objective: str) -> float:
    """Return the value of an order; infinity if it exceeds the memory.

    Raises:
        VerificationError: the order would not run.
    """
    timeline = simulate(order.to_schedule(problem, "candidate"), problem.costs)
    peaks = zip(timeline.peak_memory, problem.memory_limit.tolist(), strict=True)
    if any(peak > limit * (1 + ROUNDING) for peak, limit in peaks):
        return math.inf
    if objective == "period":
        return steady_period(timeline.schedule, problem.costs)
    return timeline.makespan if objective == "makespan" else timeline.span


def optimizers_of(problem: Problem) -> NDArray[np.float64]:
    """Return how long the optimizer of each rank takes."""
    of_stages = problem.costs.per_stage("optimizer", problem.stages)
    return np.bincount(problem.rank_of, of_stages, problem.ranks).astype(np.float64)


def times_in(problem: Problem) -> Iterable[float]:
    """Return every time that values are made of."""
    yield problem.dispatch
    yield from optimizers_of(problem).tolist()
    for each in (problem.forward, problem.input, problem.weight, problem.whole):
        yield from each.tolist()
    for inputs in (problem.forward_inputs, problem.backward_inputs):
        yield from inputs.delay.tolist()


def checked_value(problem: Problem, order: Order, objective: str) -> float:
    """Return the value of an order that a search starts from."""
    stages = order.tokens // KINDS
    halves = stages[(order.tokens % KINDS != F) & (order.tokens % KINDS != B) & ~problem.splits[stages]]
    if len(halves):
        stage = int(halves[0])
        raise ScheduleError(f"the order splits the backward of stage {stage}, which the problem does not; use B")
    counts = np.bincount(order.tokens, minlength=KINDS * problem.stages).reshape(-1, KINDS)
    if not (counts[:, F] == problem.microbatches).all():
        runs = dict(enumerate(counts[:, F].tolist()))
        raise ScheduleError(
            f"the problem has {problem.microbatches} microbatches, but the order runs F by stage: {runs}"
        )
    value = value_of(problem, order, objective)
    if not math.isfinite(value):
        raise ScheduleError("the order exceeds the memory limit; pass an order that fits")
    return value
