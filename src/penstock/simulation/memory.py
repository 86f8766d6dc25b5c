"""Computes how much memory the activations of a rank take, action by action, and what it holds over time."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.simulation.waiting_values import WaitingValues

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


class MemoryCurve(NamedTuple):
    """The memory that a rank holds over time.

    Attributes:
        times: when it changes.
        values: the memory from that time on.
    """

    times: Floats
    values: Floats


class Times(NamedTuple):
    """When the blocking cells of a graph start and end."""

    start: Floats
    end: Floats


def memory_curves(
    graph: StepGraph, use: MemoryUse, times: Times, waiting: WaitingValues | None = None
) -> tuple[MemoryCurve, ...]:
    """Return the memory that each rank holds over time: that of its cells, and of values that wait to be used."""
    bounds = np.searchsorted(graph.rank[graph.blocking], np.arange(graph.ranks + 1)).tolist()
    curves = []
    for rank, (begin, end) in enumerate(pairwise(bounds)):
        mine = Times(times.start[begin:end], times.end[begin:end])
        held = np.stack([use.during[begin:end], use.after[begin:end]], axis=1).ravel()
        curve = MemoryCurve(np.append(0.0, np.stack(mine, axis=1)), np.append(use.static[rank], held))
        if waiting is not None:
            here = np.flatnonzero(graph.rank[waiting.user] == rank)
            user = np.searchsorted(graph.blocking[begin:end], waiting.user[here])
            curve = _with_waiting(curve, mine, WaitingValues(waiting.arrival[here], user, waiting.amount[here]))
        curves.append(curve)
    return tuple(curves)


def _with_waiting(curve: MemoryCurve, times: Times, waiting: WaitingValues) -> MemoryCurve:
    """Add values that wait, each from its arrival until its user, the index of a cell, starts.

    What arrives just when a cell starts or ends comes after that.
    """
    ahead = np.searchsorted(times.start, waiting.arrival, side="right")
    is_running = np.append(-np.inf, times.end)[ahead] > waiting.arrival
    place = 1 + 2 * ahead - is_running
    order = np.lexsort([waiting.arrival, place])
    place, arrival, amount = place[order], waiting.arrival[order], waiting.amount[order]
    used = np.bincount(1 + 2 * waiting.user, waiting.amount, len(curve.values))
    change = np.insert(-used, place, amount)
    values = np.insert(curve.values, place, curve.values[place - 1])
    return MemoryCurve(np.insert(curve.times, place, arrival), values + np.cumsum(change))


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
