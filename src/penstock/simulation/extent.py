"""Computes when each rank begins and ends, and the total time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.graph.action_table import NONE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.costs import Costs
    from penstock.simulation.step_graph import StepGraph

    Floats = NDArray[np.float64]


class Extent(NamedTuple):
    """When a run begins and ends.

    Attributes:
        origin: the first start, in the times of the nodes; all other times count from it.
        begin: the latest time at which each rank could begin: its first compute action, minus what comes before it.
        end: when each rank has run its last action.
    """

    origin: float
    begin: Floats
    end: Floats

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return float(self.end.max(initial=0.0))

    @property
    def span(self) -> float:
        """The longest time that a rank takes from its own beginning to its own end."""
        return float((self.end - self.begin).max(initial=0.0))


def extent_of(graph: StepGraph, costs: Costs, start: Floats, duration: Floats) -> Extent:
    """Return the extent of a run with these starts and durations of the nodes.

    An action counts if it computes or takes time. What a rank does before it first computes, such as UNSHARD, it could
    do just in time: so it begins that much earlier, and no earlier.
    """
    others = graph.non_compute if costs.dispatch else graph.non_compute[duration[graph.non_compute] > 0]
    firsts = np.concatenate([graph.first_compute, graph.last_of_ranks(others[::-1])])
    lasts = np.stack([graph.last_compute, graph.last_of_ranks(others)])
    if (firsts == NONE).all():
        return Extent(0.0, np.zeros(graph.ranks), np.zeros(graph.ranks))
    origin = float(start[firsts[firsts != NONE]].min())
    ends = np.where(lasts == NONE, origin, start[lasts] + duration[lasts]).max(axis=0)  # a rank runs in order
    return Extent(origin, _begins(graph, costs, start, duration, origin) - origin, ends - origin)


def _begins(graph: StepGraph, costs: Costs, start: Floats, duration: Floats, origin: float) -> Floats:
    """Return when each rank begins if it runs what comes before its first compute action just in time."""
    first, ahead = graph.first_compute, graph.before_compute
    before = np.bincount(graph.rank[ahead], duration[ahead], graph.ranks)
    before = before + costs.dispatch * (first - graph.actions.first_cell[:-1])
    return np.where(first == NONE, origin, start[first] - before)
