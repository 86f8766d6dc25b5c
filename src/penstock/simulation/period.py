"""Computes the time per step of a long run in which no rank waits for the others between steps.

Let D[r, q] be the longest path from the first start of rank r to the last end of rank q. If rank r begins a step at
time t, rank q cannot begin the next one before t + D[r, q]. So the time per step tends to the largest mean of D over
the cycles of ranks. It is also the smallest window into which every rank could fit a step if each could delay its
first action as it likes; the span, in which no action is delayed, is never less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.graph.action_table import NONE
from penstock.graph.start_times import start_times
from penstock.simulation.simulate import prepare

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.graph.comm_model import CommModel
    from penstock.ir.schedule import Schedule
    from penstock.simulation.costs import Costs

    Floats = NDArray[np.float64]

#: Before everything, and still a number: sums with it stay below half of it.
_LONG_AGO: Final = -1e200


def steady_period(schedule: Schedule, costs: Costs | None = None, *, model: CommModel | None = None) -> float:
    """Return the time per step of a long run in which no rank waits for the others between steps.

    The optimizer counts, which every rank runs after its last action. O(actions x ranks).

    >>> from penstock.schedules.registry import build
    >>> steady_period(build("1F1B", ranks=4, microbatches=8)), steady_period(build("ZBV", ranks=4, microbatches=8))
    (33.0, 48.0)
    """
    graph, costs = prepare(schedule, costs, model)
    duration, delays = graph.durations(costs), graph.delays(costs)
    first = graph.first_compute
    running = np.flatnonzero(first != NONE)
    begins = graph.events.node[first[running]]
    ends = graph.events.node[graph.last_compute[running]]
    optimizer = duration[graph.cells + running]
    crossing = np.empty((len(running), len(running)))
    for row, begin in enumerate(begins):
        release = np.full(graph.nodes, _LONG_AGO)
        release[begin] = 0.0
        start, _ = start_times(graph.order, duration, delays, release)
        crossing[row] = start[ends] + duration[ends] + optimizer + costs.dispatch
    crossing[crossing < _LONG_AGO / 2] = -np.inf
    return largest_cycle_mean(crossing)


def largest_cycle_mean(weight: Floats) -> float:
    """Return the largest mean weight of a cycle, given that of every edge, -inf where there is none. O(n^3).

    Karp, "A characterization of the minimum cycle mean in a digraph", 1978.

    >>> largest_cycle_mean(np.array([[1.0, 4.0], [2.0, -np.inf]]))
    3.0
    """
    count = len(weight)
    longest = np.full((count + 1, count), -np.inf)  # the heaviest walk of so many edges that ends there
    longest[0] = 0.0
    for length in range(1, count + 1):
        longest[length] = (longest[length - 1][:, None] + weight).max(axis=0)
    reached = np.flatnonzero(longest[count] > -np.inf)
    if not len(reached):
        return 0.0
    shorter = longest[:count, reached]
    with np.errstate(invalid="ignore"):
        means = (longest[count, reached] - shorter) / np.arange(count, 0, -1)[:, None]
    return float(np.where(shorter > -np.inf, means, np.inf).min(axis=0).max())
