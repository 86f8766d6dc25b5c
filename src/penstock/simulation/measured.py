"""Makes the timeline of a step that was run: the same type as that of a simulation, with times that were measured.

The graph of the schedule says what each action waits for; the times say how long. What a rank waited for longest is
what was there last. An action starts when it has its inputs. Between the end of the action before and the moment at
which it begins to wait for them, its rank may wait for its own sends; the rest of that time, in which it posts
transfers and starts the action, is *dispatch*.

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
from penstock.simulation.link_costs import link_numbers
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
        held: for how long its rank waited for its own sends between the action before and this one.
    """

    action: Action
    reached: float
    start: float
    end: float
    held: float = 0.0


class Measured(NamedTuple):
    """What a measured timeline has in addition to a predicted one.

    Attributes:
        reached: when a rank had got to each cell, before it waited for what the cell needs, in the times of the nodes.
        held: how long the rank waited for its own sends before that, since the cell that it ran before.
        clock_error: by how many seconds the clocks of two ranks may differ, at most.
    """

    reached: Floats
    held: Floats
    clock_error: float


def measured_timeline(
    schedule: Schedule, ranks: Sequence[Sequence[ActionTimes]], costs: Costs, *, clock_error: float = 0.0
) -> Timeline:
    """Return the timeline of one step that was run.

    Args:
        schedule: the lowered schedule that was run.
        ranks: for each rank, its actions in the order in which they ran; the parts of an overlap are separate. An
            action may be missing, because there was nothing to do or the step ended early; it takes no time.
        costs: what actions and transfers cost, in seconds.
        clock_error: by how many seconds the clocks of two ranks may differ, at most.
    """
    graph = build_step_graph(schedule, None, 1, True)
    costs.check(schedule.stages, len(schedule.edges))
    actions = _times_of_actions(graph, ranks)
    first, last = graph.first_action, np.append(graph.first_action[1:], len(graph.actions)) - 1
    reached, start, end = actions.reached[first], actions.start[first], actions.end[last]
    held = np.bincount(graph.actions.cell, actions.held, graph.cells).astype(np.float64)
    _place_transfers(graph, actions, graph.durations(costs), start, end)
    ends = _ends_of_ranks(graph, end)
    start, duration = np.append(start, ends), np.append(end - start, np.zeros(len(ends)))
    critical = measured_critical_edges(graph, start, duration)
    return Timeline(schedule, costs, graph, start, duration, critical, Measured(reached, held, clock_error))


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
    held: Floats


def _times_of_actions(graph: StepGraph, ranks: Sequence[Sequence[ActionTimes]]) -> _Times:
    found: list[tuple[float, float, float, float]] = []
    # No rank does nothing before the first one does something.
    starts = [time.start for times in ranks for time in times if time.action.computation_type not in TRANSFER_TYPES]
    if not starts:
        raise RunError("no rank recorded an action of the step")
    origin = min(starts)
    for row, times in zip(graph.schedule.actions, ranks, strict=True):
        before = max(origin, min((time.reached for time in times), default=origin))
        of_action: defaultdict[Action, deque[ActionTimes]] = defaultdict(deque)
        held = 0.0
        for time in times:
            held += time.held
            of_action[time.action].append(time._replace(held=held))
            held = held if time.action.computation_type in TRANSFER_TYPES else 0.0
        for action in (part for cell in row if cell is not None for part in cell.parts):
            if not of_action[action]:
                found.append((before, before, before, 0.0))
                continue
            _, reached, start, end, held = of_action[action].popleft()
            if action.computation_type not in TRANSFER_TYPES:
                before = end
            found.append((reached, start, end, held))
    return _Times(*np.array(found, np.float64).reshape(-1, 4).T)


def _ends_of_ranks(graph: StepGraph, end: Floats) -> Floats:
    """Return the times of the nodes after the cells: optimizers, which are not measured, and the end of the step."""
    last = np.full(graph.ranks, end[graph.blocking].min(initial=np.inf))
    np.maximum.at(last, graph.rank[graph.blocking], end[graph.blocking])
    return np.append(last, last.max())


def _messages(graph: StepGraph) -> tuple[Ints, Ints, Ints]:
    """Return the positions of all receives that something uses, of what uses them, and of their sends."""
    used = np.flatnonzero(graph.reason == USE)
    send_of = np.zeros(len(graph.actions), np.int64)
    send_of[graph.pairs.receive] = graph.pairs.send
    receives = graph.events.awaited[used]
    return receives, graph.events.waiting[used], send_of[receives]


def find_delays(schedule: Schedule, ranks: Sequence[Sequence[ActionTimes]]) -> dict[int, list[float]]:
    """Find how long messages took that a rank waited for, by the number of their link: from when they had been posted.

    Args:
        schedule: the lowered schedule.
        ranks: for each rank, its actions in the order in which they ran.
    """
    graph = build_step_graph(schedule, None, 1, True)
    times = _times_of_actions(graph, ranks)
    receives, users, sends = _messages(graph)
    stage = graph.actions.stage
    source, target = stage[sends], stage[receives]
    links = link_numbers(schedule, np.minimum(source, target), np.maximum(source, target))
    awaited = times.end[sends] > times.reached[users]
    taken = np.maximum(times.start[users] - times.end[sends], 0.0)
    found: defaultdict[int, list[float]] = defaultdict(list)
    for link, delay in zip(links[awaited].tolist(), taken[awaited].tolist(), strict=True):
        found[link].append(delay)
    return found


def _place_transfers(graph: StepGraph, times: _Times, usual: Floats, start: Floats, end: Floats) -> None:
    """Fill in when messages were in flight, by cell: a send from when it was posted, a receive at its arrival."""
    cell = graph.actions.cell
    receives, users, sends = _messages(graph)
    expected = times.end[sends] + usual[cell[sends]]
    waited = times.start[users] - times.reached[users]
    was_there = (expected < times.reached[users]) & (waited < _NOTICEABLE)
    arrival = np.where(was_there, expected, times.start[users])
    start[cell[receives]] = end[cell[receives]] = arrival
    # A message may be there before the call that sent it returns, but not before it begins.
    start[cell[sends]] = np.clip(arrival, times.reached[sends], times.end[sends])
    end[cell[sends]] = np.maximum(arrival, start[cell[sends]])
