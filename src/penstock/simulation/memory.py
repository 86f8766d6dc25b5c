"""How much memory the activations of a rank take, action by action."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.costs import Costs
    from penstock.simulation.step_graph import Flow

    Floats = NDArray[np.float64]


class Held(NamedTuple):
    """What a rank holds around each of its cells, in the order of ``flow.blocking``.

    Attributes:
        during: while the cell runs.
        after: when it has ended.
        static: what each rank holds besides, always; in both of the others already.
    """

    during: Floats
    after: Floats
    static: Floats


def held(flow: Flow, costs: Costs) -> Held:
    """Prefix sums along the order of every rank. O(n)."""
    taken, released = _changes(flow, costs)
    rank = flow.rank[flow.blocking]
    bounds = np.searchsorted(rank, np.arange(flow.ranks + 1)).tolist()
    total = np.concatenate([np.cumsum(taken[a:b] - released[a:b]) for a, b in pairwise(bounds)])
    static = np.bincount(
        flow.schedule.placement.rank_of, costs.per_stage("static", flow.schedule.stages), flow.ranks
    ).astype(np.float64)
    after = total + static[rank]
    return Held(after + released, after, static)


def _changes(flow: Flow, costs: Costs) -> tuple[Floats, Floats]:
    """What every blocking cell takes when it starts, and releases when it ends."""
    actions, stages = flow.actions, flow.schedule.stages
    activation, share = costs.per_stage("activation", stages), costs.per_stage("input_release", stages)
    changes = []
    releases = [(FULL_BACKWARD, activation), (BACKWARD_INPUT, activation * share)]
    releases += [(BACKWARD_WEIGHT, activation - activation * share)]
    if not len(actions.positions_of(FULL_BACKWARD, BACKWARD_INPUT)):
        releases = [(FORWARD, activation)]  # without a backward nothing is kept for it
    for kinds in ([(FORWARD, activation)], releases):
        change = np.zeros(flow.cells)
        for kind, amount in kinds:
            mine = actions.positions_of(kind)
            change += np.bincount(actions.cell[mine], amount[actions.stage[mine]], flow.cells)
        changes.append(change[flow.blocking])
    return changes[0], changes[1]
