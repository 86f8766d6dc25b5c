"""Makes the timeline of a step that was run: the same type as that of a simulation, with times that were measured.

The graph of the schedule says what each action waits for; the times say how long. What a rank waited for longest is
what was there last. An action starts when it has its inputs; between the end of the action before and the moment at
which it begins to wait, its rank posts transfers and starts the action, which is *dispatch*.

A rank knows when a message is there only if it waits for it. If it does not, the message is assumed to take as long as
the costs say, but no longer than until it is used.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.errors import RunError
from penstock.graph.start_times import critical_edges
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.simulation.step_graph import POST, USE, build_step_graph
from penstock.simulation.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.ir.actions import Action
    from penstock.ir.schedule import Schedule
    from penstock.simulation.costs import Costs
    from penstock.simulation.step_graph import StepGraph

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: Waiting for a message that is there takes less than this, in seconds.
_NOTICEABLE: Final = 50e-6


class ActionTimes(NamedTuple):
    """When an action ran, in seconds on one clock for all ranks.

    Attributes:
        action: the action.
        reached: when its rank had got to it.
        start: when it had waited for its inputs, if it has any.
        end: when it had ended.
    """

    action: Action
    reached: float
    start: float
    end: float


class Measured(NamedTuple):
    """What a measured timeline has in addition to a predicted one.

    Attributes:
        reached: when a rank had got to each cell, before it waited for what the cell needs, in the times of the nodes.
        clock_error: by how many seconds the clocks of two ranks may differ, at most.
    """

    reached: Floats
    clock_error: float


def measured_timeline(
    schedule: Schedule, ranks: Sequence[Sequence[ActionTimes]], costs: Costs, *, clock_error: float = 0.0
) -> Timeline:
    """Return the timeline of one step that was run.

    Args:
        schedule: the lowered schedule that was run.
        ranks: for each rank, its actions in the order in which they ran; the parts of an overlap are separate. An
            action that has nothing to do may be missing.
        costs: what actions and transfers cost, in seconds.
        clock_error: by how many seconds the clocks of two ranks may differ, at most.
    """
    graph = build_step_graph(schedule, None, 1, True)
    costs.check(schedule.stages, len(schedule.edges))
    actions = _times_of_actions(graph, ranks)
    first, last = graph.first_action, np.append(graph.first_action[1:], len(graph.actions)) - 1
    reached, start, end = actions.reached[first], actions.start[first], actions.end[last]
    _place_transfers(graph, actions, graph.durations(costs), start, end)
    ends = _ends_of_ranks(graph, end)
    start, duration = np.append(start, ends), np.append(end - start, np.zeros(len(ends)))
    critical = measured_critical_edges(graph, start, duration)
    return Timeline(schedule, costs, graph, start, duration, critical, Measured(reached, clock_error))


def measured_critical_edges(graph: StepGraph, start: Floats, duration: Floats) -> Ints:
    """Return the edge that each node of a measured run waited for longest: the one that was there last."""
    after_end = np.zeros(len(graph.source))
    # A transport may post a receive ahead of its place, so what comes before it in the schedule does not hold it up.
    posted = np.flatnonzero(graph.reason[: len(graph.events.waiting)] == POST)
    is_receive = np.isin(graph.actions.cell[graph.events.waiting[posted]], graph.actions.cell[graph.pairs.receive])
    after_end[posted[is_receive]] = -np.inf
    return critical_edges(graph.order, start, duration, after_end, np.zeros(graph.nodes) - np.inf)


class _Times(NamedTuple):
    """The times of the actions of all ranks; of a transfer, those of posting it."""

    reached: Floats
    start: Floats
    end: Floats


def _times_of_actions(graph: StepGraph, ranks: Sequence[Sequence[ActionTimes]]) -> _Times:
    found: list[tuple[float, float, float]] = []
    # No rank does nothing before the first one does something.
    origin = min(time.start for times in ranks for time in times if time.action.computation_type not in TRANSFER_TYPES)
    for rank, (row, times) in enumerate(zip(graph.schedule.actions, ranks, strict=True)):
        if not times and any(row):
            raise RunError(f"rank {rank} recorded no action of the step")
        before = max(origin, min((time.reached for time in times), default=origin))
        of_action: defaultdict[Action, deque[ActionTimes]] = defaultdict(deque)
        for time in times:
            of_action[time.action].append(time)
        for action in (part for cell in row if cell is not None for part in cell.parts):
            if not of_action[action]:  # nothing to do, as for UNSHARD without FSDP
                found.append((before, before, before))
                continue
            _, *own = of_action[action].popleft()
            if action.computation_type not in TRANSFER_TYPES:
                before = own[-1]
            found.append((own[0], own[1], own[2]))
    return _Times(*np.array(found, np.float64).reshape(-1, 3).T)


def _ends_of_ranks(graph: StepGraph, end: Floats) -> Floats:
    """Return the times of the nodes after the cells: optimizers, which are not measured, and the end of the step."""
    last = np.full(graph.ranks, end[graph.blocking].min(initial=np.inf))
    np.maximum.at(last, graph.rank[graph.blocking], end[graph.blocking])
    return np.append(last, last.max())


def _place_transfers(graph: StepGraph, times: _Times, usual: Floats, start: Floats, end: Floats) -> None:
    """Fill in when messages were in flight, by cell: a send from when it was posted, a receive at its arrival."""
    cell, used = graph.actions.cell, np.flatnonzero(graph.reason == USE)
    receives, users = graph.events.awaited[used], graph.events.waiting[used]
    send_of = np.zeros(len(graph.actions), np.int64)
    send_of[graph.pairs.receive] = graph.pairs.send
    sends = send_of[receives]
    expected = times.end[sends] + usual[cell[sends]]
    waited = times.start[users] - times.reached[users]
    was_there = (expected < times.reached[users]) & (waited < _NOTICEABLE)
    arrival = np.where(was_there, expected, times.start[users])
    start[cell[receives]] = end[cell[receives]] = arrival
    # A message may be there before the call that sent it returns, but not before it begins.
    start[cell[sends]] = np.clip(arrival, times.reached[sends], times.end[sends])
    end[cell[sends]] = np.maximum(arrival, start[cell[sends]])
