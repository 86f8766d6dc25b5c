"""Fits schedules that split the backward to given costs: weight gradients run where a rank would be idle.

An order that does not depend on costs is optimal only for the costs that it was designed for. Here forwards and input
gradients keep their order. No other rank waits for a weight gradient, so it is delayed until its rank has nothing else
to do, or needs the memory. How long a gap must be to be filled depends on who waits for what follows; several choices
are tried.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from penstock.errors import CostsError
from penstock.ir.schedule import Schedule
from penstock.schedules.action_costs import NONE, StageCosts, action_costs
from penstock.schedules.gap_filling import GapFilling, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.schedules.action_costs import ActionCosts
    from penstock.schedules.gap_filling import Run

    Ints = NDArray[np.int64]

#: How long a gap must be to be filled, as a share of the weight gradient that would fill it.
PATIENCES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)

#: The tolerance of memory limits, as a share: anything below is rounding.
ROUNDING: Final = 1e-9


class Simulator(Protocol):
    """Simulates plans for a schedule with these costs."""

    def __init__(self, actions: ActionCosts) -> None: ...

    def run(self, plan: Plan) -> Run:
        """Run a plan."""


def fit_to_costs(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Place the weight gradients of a schedule for these costs.

    Returns the best of about a dozen orders, by span and then by makespan. The given schedule is one of them, and no
    rank holds more memory than in it. Each order takes O(actions x log ranks).

    >>> from penstock.schedules.zbv_zero_bubble import zbv_zero_bubble
    >>> from penstock.simulation.costs import Costs
    >>> plain = zbv_zero_bubble(ranks=2, microbatches=3)
    >>> for row in fit_to_costs(plain, Costs(forward=2, backward_input=2, backward_weight=1)).actions:
    ...     print(*row)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    if not isinstance(costs, StageCosts):
        raise CostsError(f"costs must be Costs, e.g. Costs(forward=1, backward_input=1), got {costs!r}")
    return fit(schedule, costs, GapFilling)


def fit(schedule: Schedule, costs: StageCosts, simulator: type[Simulator]) -> Schedule:
    """Do so with this simulator."""
    actions = action_costs(schedule, costs)
    rows = [np.arange(begin, end) for begin, end in pairwise(schedule.offsets.tolist())]
    run = simulator(actions).run
    plain = run(Plan(rows, False, [inf] * len(rows), 1.0, [len(row) for row in rows]))

    is_delayed = np.zeros(len(actions.owes), np.bool_)
    is_delayed[actions.owes[actions.owes != NONE]] = True
    orders = [row[~is_delayed[row]] for row in rows]
    limits = [peak * (1 + ROUNDING) for peak in plain.peaks]
    tails = [_tail(order, actions) for order in orders]

    def simulate(patience: float, hurried: int = 0) -> Run:
        """Run with this patience; the first ``hurried`` ranks fill any gap once only the tail is left."""
        patient = [len(order) for order in orders[hurried:]]
        return run(Plan(orders, True, limits, patience, tails[:hurried] + patient))

    by_patience = {patience: simulate(patience) for patience in PATIENCES}
    best = min(by_patience, key=lambda patience: by_patience[patience].quality)
    hurrying = [simulate(best, hurried) for hurried in _doubling(schedule.ranks)]
    chosen = min([plain, *by_patience.values(), *hurrying], key=lambda each: each.quality)
    if chosen is plain:
        return schedule
    return Schedule.from_codes(
        [schedule.codes[row] for row in chosen.rows],
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        metadata={**schedule.metadata, "name": f"{schedule.metadata['name']}, fitted"},
    )


def _tail(order: Ints, actions: ActionCosts) -> int:
    """Return where the order has only input gradients of the rank's first stage left, which no action here needs."""
    stage = actions.stage[order]
    is_other = (actions.owes[order] == NONE) | (stage != stage.min())
    return int(np.flatnonzero(is_other)[-1]) + 1 if is_other.any() else 0


def _doubling(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ..., and finally ``most``."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most
