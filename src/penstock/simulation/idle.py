"""Explains why a rank is idle: every interval in which it runs nothing, with what it waits for.

Before each action a rank may wait, in this order: until the previous step has ended (*step*) and its earlier actions
have been dispatched (*dispatch*); until another rank has produced what the action needs (*activation* or *gradient*)
and has got to sending it (*unsent*); until the lane of the transfer is free (*lane*); while the transfer is in flight
(*transfer*). From the moment at which something later in its own order could run, that order keeps it idle (*order*).
After its last action it is *drained*.

In a measured run there is one step. Between two actions a rank may wait for its own sends to be received (*sends*);
all else that it does there is *dispatch*: it posts transfers, and starts the action.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.graph.action_table import NONE
from penstock.graph.start_times import NOTHING
from penstock.ir.actions import COMPUTE
from penstock.ir.dependencies import TRANSFERS
from penstock.simulation.step_graph import DATA, POST, PROGRAM, USE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.ir.actions import Action
    from penstock.simulation.timeline import Timeline

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: Gaps below this share of the makespan are rounding: 0.1 + 0.2 is not quite 0.3.
ROUNDING: Final = 1e-12

CAUSES: Final = (
    "activation", "gradient", "unsent", "lane", "transfer", "order", "dispatch", "sends", "step", "drained",
)  # fmt: skip


class Idle(NamedTuple):
    """An interval in which a rank runs nothing, with one cause.

    Attributes:
        rank: the rank.
        start: when it begins.
        end: when it ends.
        cause: one of ``CAUSES``.
        before: the action that the rank runs next, if any.
        awaited: the action on another rank whose output it waits for, if any.
        source: the rank of that action.
        could_run: if the cause is the order, the later action that could run.
    """

    rank: int
    start: float
    end: float
    cause: str
    before: Action | None = None
    awaited: Action | None = None
    source: int | None = None
    could_run: Action | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} is idle from {self.start:g} to {self.end:g}: {self.why}"

    @property
    def why(self) -> str:
        """The cause in words."""
        if self.cause == "drained":
            return "it has run its last action"
        if self.cause == "dispatch":
            return f"it takes time to start {self.before}"
        if self.cause == "sends":
            return f"before {self.before}, it waits until what it has sent has been received"
        if self.cause == "step":
            return "the previous step has not ended"
        what = f"the output of {self.awaited} on rank {self.source}"
        if self.cause == "order":
            return f"program order: {self.could_run} could run, but {self.before} is next, which waits for {what}"
        if self.cause == "unsent":
            return f"{self.before} waits for {what}, which has not been sent yet"
        if self.cause == "lane":
            return f"{self.before} waits for {what}, whose lane is busy"
        if self.cause == "transfer":
            return f"{self.before} waits for {what}, which is in flight"
        return f"{self.before} waits for the {self.cause} of {self.awaited} on rank {self.source}"


def idle_intervals(timeline: Timeline) -> tuple[Idle, ...]:
    """Return every interval with its cause, rank by rank in order. Linear, apart from one search per interval."""
    return tuple(sorted([*_gaps(timeline), *_drained(timeline)], key=lambda wait: (wait.rank, wait.start)))


def _drained(timeline: Timeline) -> Iterator[Idle]:
    for rank, end in enumerate(timeline.extent.end.tolist()):
        if timeline.makespan - end > ROUNDING * timeline.makespan:
            yield Idle(rank, end, timeline.makespan, "drained")


class _Moments(NamedTuple):
    """When the cause of each gap changes to the next; the first moment begins the gap, the last ends it."""

    begin: Floats
    stepped: Floats
    started: Floats
    made: Floats
    posted: Floats
    sets_out: Floats
    arrives: Floats
    end: Floats


def _gaps(timeline: Timeline) -> Iterator[Idle]:
    graph, runs, origin = timeline.step_graph, timeline.step_graph.blocking, timeline.extent.origin
    start = timeline.node_start[runs]
    ends = start + timeline.node_duration[runs]
    same_rank = np.append(False, graph.rank[runs][1:] == graph.rank[runs][:-1])
    previous = np.where(same_rank, np.append(0.0, ends[:-1]), origin)
    slack = ROUNDING * timeline.makespan
    late = np.flatnonzero(start > previous + slack)
    if not len(late):
        return
    moments = _moments(timeline, runs[late], previous[late])
    ready, could_run = _soonest_later(timeline, late)
    ordered = np.clip(ready, moments.started, moments.end)
    makers = _makers_of(timeline, timeline.critical[runs[late]])
    at_first, afterwards = ("step", "lane") if timeline.measured is None else ("sends", "dispatch")
    for number, cell in enumerate(runs[late].tolist()):
        rank, before = int(graph.rank[cell]), timeline.spans[cell].action
        maker = int(makers[number])
        action, source = (timeline.spans[maker].action, int(graph.rank[maker])) if maker != NONE else (None, None)
        word = "activation" if maker != NONE and graph.is_forward[timeline.critical[cell]] else "gradient"
        bounds = [float(moment[number]) - origin for moment in moments]
        until = float(ordered[number]) - origin
        causes = (at_first, "dispatch", word, "unsent", "lane", "transfer", afterwards)
        for cause, (begin, end) in zip(causes, pairwise(bounds), strict=True):
            if min(end, until) - begin > slack:
                yield Idle(rank, begin, min(end, until), cause, before, action, source)
        if bounds[-1] - until > slack:
            other = timeline.spans[int(could_run[number])].action
            yield Idle(rank, until, bounds[-1], "order", before, action, source, other)


def _moments(timeline: Timeline, cells: Ints, previous: Floats) -> _Moments:
    """Return when each of these cells may begin, and when its input was produced, sent and received, within its gap."""
    graph, node_end = timeline.step_graph, timeline.node_start + timeline.node_duration
    end = timeline.node_start[cells]
    made, posted, sets_out, arrives = (end.copy() for _ in range(4))
    edges = timeline.critical[cells]
    reasons = np.append(graph.reason, NOTHING)[edges]

    between = np.flatnonzero(reasons == DATA)
    made[between] = posted[between] = sets_out[between] = node_end[graph.source[edges[between]]]

    received = np.flatnonzero(reasons == USE)
    if len(received):
        sent = _sent(timeline, edges[received])
        node = graph.events.node[sent]
        made[received] = node_end[_makers(timeline, sent)]
        sets_out[received], arrives[received] = timeline.node_start[node], node_end[node]
        # Of a measured send only that moment is known; what kept its rank from it is why it was not sent.
        posted[received] = _posted(timeline)[sent] if timeline.measured is None else sets_out[received]
    stepped, started = _may_begin(timeline, cells)
    if timeline.measured is not None:
        has_waited = (reasons == DATA) | (reasons == USE)
        started = np.where(has_waited, timeline.measured.reached[cells], end)
        stepped = previous + timeline.measured.held[cells]
    moments = [previous]
    for moment in (stepped, started, made, posted, sets_out, arrives):
        moments.append(np.clip(moment, moments[-1], end))
    return _Moments._make([*moments, end])


def _may_begin(timeline: Timeline, cells: Ints) -> tuple[Floats, Floats]:
    """Return when the previous step has ended for each of these cells, and when its rank has got to it."""
    graph, node_end = timeline.step_graph, timeline.node_start + timeline.node_duration
    stepped, started = np.zeros(graph.nodes), graph.release_times(timeline.costs)
    into_step = np.flatnonzero(graph.begins != NONE)
    np.maximum.at(stepped, graph.target[into_step], node_end[graph.source[into_step]])
    own = np.flatnonzero((graph.reason == PROGRAM) | (graph.begins != NONE))
    np.maximum.at(started, graph.target[own], node_end[graph.source[own]] + graph.delays(timeline.costs)[own])
    return stepped[cells], started[cells]


def _makers(timeline: Timeline, sent: Ints) -> Ints:
    """Return the cells that produce what these cells send."""
    actions = timeline.step_graph.actions
    sends = timeline.step_graph.first_action[sent]
    maker = np.full(len(sends), NONE, np.int64)
    for transfer in TRANSFERS:
        mine = np.flatnonzero(actions.is_kind(sends, transfer.send))
        maker[mine] = actions.find_any(transfer.made_by, actions.stage[sends[mine]], actions.microbatch[sends[mine]])
    return np.asarray(actions.cell[maker])


def _sent(timeline: Timeline, edges: Ints) -> Ints:
    """Return the cells of the sends whose receives these edges wait for."""
    graph = timeline.step_graph
    send = np.full(len(graph.actions), NONE, np.int64)
    send[graph.pairs.receive] = graph.pairs.send
    return np.asarray(graph.actions.cell[send[graph.events.awaited[edges]]])


def _posted(timeline: Timeline) -> Floats:
    """Return when the rank of every send and receive got to it."""
    graph = timeline.step_graph
    posted = graph.post_times(timeline.costs)
    edges = np.flatnonzero(graph.reason[: len(graph.events.waiting)] == POST)
    source = graph.source[edges]
    when = timeline.node_start[source] + timeline.node_duration[source] + graph.delays(timeline.costs)[edges]
    posted[graph.actions.cell[graph.events.waiting[edges]]] = when
    return posted


def _makers_of(timeline: Timeline, edges: Ints) -> Ints:
    """Return the cells on other ranks that produce what these edges wait for; ``NONE`` if they do not wait for data."""
    graph = timeline.step_graph
    reasons = np.append(graph.reason, NOTHING)[edges]
    makers = np.full(len(edges), NONE, np.int64)
    makers[reasons == DATA] = graph.source[edges[reasons == DATA]]
    makers[reasons == USE] = _makers(timeline, _sent(timeline, edges[reasons == USE]))
    return makers


def _soonest_later(timeline: Timeline, late: Ints) -> tuple[Floats, Ints]:
    """Return for each of these blocking cells when the first later one of its rank and step could run, and which."""
    graph, runs = timeline.step_graph, timeline.step_graph.blocking
    ready = _ready(timeline)[runs]
    group = graph.rank[runs] * graph.steps + graph.step[runs]
    soonest, which = np.full(len(runs), np.inf), np.zeros(len(runs), np.int64)
    bounds = [*np.flatnonzero(np.append(True, np.diff(group) != 0)).tolist(), len(runs)]
    for begin, end in pairwise(bounds):
        backwards = ready[begin:end][::-1]
        lowest = np.minimum.accumulate(backwards)
        place = np.maximum.accumulate(np.where(backwards == lowest, np.arange(end - begin), 0))
        soonest[begin : end - 1] = lowest[::-1][1:]
        which[begin : end - 1] = runs[end - 1 - place[::-1][1:]]
    return soonest[late], which[late]


def _ready(timeline: Timeline) -> Floats:
    """Return when all inputs of a cell have arrived at its rank; infinity for cells that do not compute."""
    graph, actions = timeline.step_graph, timeline.step_graph.actions
    ready = np.full(graph.cells, np.inf)
    ready[actions.cell[actions.positions_of(*COMPUTE)]] = 0.0
    waiting, awaited = actions.inputs
    local = actions.rank[waiting] == actions.rank[awaited]
    source = actions.cell[awaited[local]]
    np.maximum.at(ready, actions.cell[waiting[local]], timeline.node_start[source] + timeline.node_duration[source])
    between, received = np.flatnonzero(graph.reason == DATA), np.flatnonzero(graph.reason == USE)
    for edges, source in ((between, graph.source[between]), (received, graph.events.node[_sent(timeline, received)])):
        when = timeline.node_start[source] + timeline.node_duration[source] + graph.delays(timeline.costs)[edges]
        np.maximum.at(ready, graph.target[edges], when)
    return ready
