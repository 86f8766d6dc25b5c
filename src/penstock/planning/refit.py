"""Fits schedules that split the backward to costs, compiled: the same results as ``schedules/cost_fitting.py``."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.jit import jit
from penstock.planning.kernels.gap_filling import fill_gaps
from penstock.schedules.cost_fitting import fit
from penstock.schedules.gap_filling import Plan, Run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.ir.schedule import Schedule
    from penstock.schedules.action_costs import ActionCosts, StageCosts

    Ints = NDArray[np.int64]


def refit(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Place the weight gradients of a schedule for these costs; ``fit_to_costs`` is the interpreted form.

    >>> from penstock.schedules.zbv_zero_bubble import zbv_zero_bubble
    >>> from penstock.simulation.costs import Costs
    >>> plain = zbv_zero_bubble(ranks=2, microbatches=3)
    >>> print(*refit(plain, Costs(forward=2, backward_input=2, backward_weight=1)).actions[1])
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return fit(schedule, costs, CompiledGapFilling)


class CompiledGapFilling:
    """Simulates plans for a schedule, compiled."""

    def __init__(self, actions: ActionCosts) -> None:
        self._actions = actions
        self._nothing_owed = np.full_like(actions.owes, -1)

    def run(self, plan: Plan) -> Run:
        """Run a plan. O(actions x log ranks)."""
        actions, delays = self._actions, plan.delays
        owed = [actions.owes[order] for order in plan.orders] if delays else []
        lengths = [len(order) for order in plan.orders]
        owed_lengths = [int((each >= 0).sum()) for each in owed] if delays else [0] * len(lengths)
        first = _offsets(length + more for length, more in zip(lengths, owed_lengths, strict=True))
        ran, count, *times = jit(fill_gaps)(
            np.concatenate(plan.orders).astype(np.int64),
            _offsets(lengths),
            first,
            np.array(plan.limits, np.float64),
            plan.patience,
            np.array(plan.hurried_from, np.int64),
            actions.awaits,
            actions.delay,
            actions.duration,
            actions.change,
            actions.owes if delays else self._nothing_owed,
            actions.reader,
            actions.dispatch,
        )
        rows = [ran[begin : begin + number] for (begin, _), number in zip(pairwise(first), count, strict=True)]
        return Run(rows, *(each.tolist() for each in times))


def _offsets(lengths: Iterable[int]) -> Ints:
    """Return where each of several parts begins, and where the last one ends."""
    return np.append(0, np.cumsum(list(lengths))).astype(np.int64)
