"""Derives from the memory limits which operations have to run before others on the same rank.

Notation: F_i(t) is the F of microbatch i in stage t, a(u) the activation of stage u, M the memory of the rank for
activations. A stage u on the rank of t is *held at* F(t) if, for the same microbatch, F(u) runs before F(t) or is F(t),
and I(u) runs after it. When F_i(t) starts, at least i + 1 F and at most i I of such a stage have run, so each holds at
least a(u), the I and W that have run having released at most what their F took.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.simulation.problem import Inputs, Problem

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]

#: By what share of the limit the memory may exceed it through rounding.
ROUNDING: Final = 1e-9


class Reach(NamedTuple):
    """Which operations of a microbatch run before which; ``[a, b]`` says whether that of stage a waits for that of b.

    Attributes:
        forward: of two F, or the same one.
        backward: of two I, or the same one.
        held: whether b is held at F(a): F(a) is F(b) or waits for it, and I(b) waits for F(a).
    """

    forward: Bools
    backward: Bools
    held: Bools

    @classmethod
    def of(cls, problem: Problem) -> Reach:
        """Follow the edges of a problem."""
        forward = _reach(problem.forward_inputs, range(problem.stages))
        backward = _reach(problem.backward_inputs, range(problem.stages - 1, -1, -1))
        after_forward = (backward.astype(np.float64) @ forward.astype(np.float64)) > 0  # I(a) waits for F(b)
        together = problem.rank_of[:, None] == problem.rank_of[None, :]
        return cls(forward, backward, forward & after_forward.T & together)


class Need(NamedTuple):
    """An operation of ``stage`` waits for one of ``other``, ``back`` microbatches earlier."""

    stage: int
    other: int
    back: int


class MemoryOrder(NamedTuple):
    """Which earlier operations on its rank each F waits for because of memory."""

    forward: list[Need]
    input: list[Need]
    weight: list[Need]


def memory_order(problem: Problem) -> MemoryOrder:
    """Return what each F waits for because of memory: one entry per two stages and type.

    The proofs, in the order of the code:

    - F_i(t) starts after I_(i-k)(u). Let n be the number of I(u) that have run by then. Of the stages held at F(t),
      those whose I waits for I(u), and u itself, have each run at most n I, so they hold at least a (i + 1 - n) each;
      the others hold a each. That fits into M if i + 1 - n <= (M - others) / (sum of a): k is the right side, rounded
      down.
    - F_i(t) starts after W_(i-k)(u). At most i of its I have run, and n of its W, so it holds a plus i - n times what a
      W releases; the others hold a each. So i - n is at most (M - all a) / released, and k is that plus 1, rounded
      down.
    - F_i(s) starts after F_(i-k)(t), if s is held at F(t). Otherwise, when F_(i-k)(t) starts, the stages held there
      whose F comes before F(s), and s itself, hold k + 1 microbatches each, and the others one each.
    """
    reach, order = Reach.of(problem), MemoryOrder([], [], [])
    for stage in np.flatnonzero(np.isfinite(problem.budget[problem.rank_of])).tolist():
        held = np.flatnonzero(reach.held[stage])
        amount = problem.activation[held]
        budget = float(problem.budget[problem.rank_of[stage]])
        for other in held.tolist():
            with_it = reach.backward[held, other]
            _add(order.input, stage, other, budget - amount[~with_it].sum(), amount[with_it].sum(), budget)
            released = float(problem.weight_release[other])
            _add(order.weight, stage, other, budget - amount.sum() + released, released, budget)
            if other != stage:
                ahead = reach.forward[other, held]
                _add(order.forward, other, stage, budget - amount[~ahead].sum(), amount[ahead].sum(), budget)
    return order


def held_at_once(problem: Problem) -> Floats:
    """Return the memory for activations without which no schedule of each rank exists.

    When F_0(t) starts, all stages held at it hold an activation; the largest of these sums over the stages t of a rank.
    In a chain the last stage of the rank holds one activation of every stage there, and that is enough: run one
    microbatch at a time. With other edges, stages that do not wait for each other need not hold theirs at once.
    """
    reach = Reach.of(problem)
    needed = np.zeros(problem.ranks)
    np.maximum.at(needed, problem.rank_of, reach.held @ problem.activation)
    return needed


def _add(needs: list[Need], stage: int, other: int, room: float, amount: float, budget: float) -> None:
    if amount > ROUNDING * budget:
        needs.append(Need(stage, other, math.floor((room + ROUNDING * budget) / amount)))


def _reach(inputs: Inputs, order: Iterator[int] | range) -> Bools:
    stages = len(inputs.first) - 1
    reach = np.eye(stages, dtype=np.bool_)
    for stage in order:
        for entry in range(inputs.first[stage], inputs.first[stage + 1]):
            reach[stage] |= reach[inputs.stage[entry]]
    return reach
