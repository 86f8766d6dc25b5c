"""Computes how much memory the activations of a rank take, action by action."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.costs import Costs
    from penstock.simulation.step_graph import StepGraph

    Floats = NDArray[np.float64]


class MemoryUse(NamedTuple):
    """The memory of a rank around each of its cells, in the order of ``graph.blocking``.

    Attributes:
        during: while the cell runs.
        after: after it has ended.
        static: what each rank always holds; included in the other two.
    """

    during: Floats
    after: Floats
    static: Floats


def memory_use(graph: StepGraph, costs: Costs) -> MemoryUse:
    """Compute the memory use with prefix sums along the order of every rank. O(n)."""
    taken, released = _changes(graph, costs)
    rank = graph.rank[graph.blocking]
    bounds = np.searchsorted(rank, np.arange(graph.ranks + 1)).tolist()
    total = np.concatenate([np.cumsum(taken[a:b] - released[a:b]) for a, b in pairwise(bounds)])
    static = np.bincount(
        graph.schedule.placement.rank_of, costs.per_stage("static", graph.schedule.stages), graph.ranks
    ).astype(np.float64)
    after = total + static[rank]
    return MemoryUse(after + released, after, static)


def _changes(graph: StepGraph, costs: Costs) -> tuple[Floats, Floats]:
    """Return what every blocking cell allocates when it starts, and releases when it ends."""
    actions, stages = graph.actions, graph.schedule.stages
    activation, share = costs.per_stage("activation", stages), costs.per_stage("input_release", stages)
    changes = []
    releases = [(FULL_BACKWARD, activation), (BACKWARD_INPUT, activation * share)]
    releases += [(BACKWARD_WEIGHT, activation - activation * share)]
    if not len(actions.positions_of(FULL_BACKWARD, BACKWARD_INPUT)):
        releases = [(FORWARD, activation)]  # without a backward, nothing is kept
    for kinds in ([(FORWARD, activation)], releases):
        change = np.zeros(graph.cells)
        for kind, amount in kinds:
            mine = actions.positions_of(kind)
            change += np.bincount(actions.cell[mine], amount[actions.stage[mine]], graph.cells)
        changes.append(change[graph.blocking])
    return changes[0], changes[1]
