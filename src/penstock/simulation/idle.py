"""Why a rank is idle: every moment in which it runs nothing, with what it waits for.

Before each action a rank may wait, in this order: until the step before has ended (*step*) and it has started so many
actions (*dispatch*); until another rank has made what the action needs (*activation* or *gradient*), and has got to
sending it (*unsent*); until the lane of the transfer is free (*lane*); while it is under way (*transfer*). From the
moment on at which something later in its own order could run, it is that order that keeps it idle (*order*). After its
last action it is *drained*.
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

#: The share of the makespan below which a gap is not one: 0.1 + 0.2 is not quite 0.3.
ROUNDING: Final = 1e-12

CAUSES: Final = ("activation", "gradient", "unsent", "lane", "transfer", "order", "dispatch", "step", "drained")


class Idle(NamedTuple):
    """An interval in which a rank runs nothing, with one cause.

    Attributes:
        rank: the rank.
        start: when it begins.
        end: when it ends.
        cause: one of ``CAUSES``.
        before: the action that the rank runs next, if there is one.
        awaited: what that action waits for, if another rank makes it.
        source: the rank that makes it.
        could_run: if the cause is the order, the action further on that could run.
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
        if self.cause == "step":
            return "the step before has not ended"
        what = f"what {self.awaited} makes on rank {self.source}"
        if self.cause == "order":
            return f"program order: {self.could_run} could run, but {self.before} is next, which waits for {what}"
        if self.cause == "unsent":
            return f"{self.before} waits for {what}, which has not sent it yet"
        if self.cause == "lane":
            return f"{self.before} waits for {what}, and its lane is busy"
        if self.cause == "transfer":
            return f"{self.before} waits for {what}, which is under way"
        return f"{self.before} waits for the {self.cause} that {self.awaited} makes on rank {self.source}"


def idle_intervals(timeline: Timeline) -> tuple[Idle, ...]:
    """Every interval with its cause, rank by rank in order. Linear but for one search per interval."""
    return tuple(sorted([*_gaps(timeline), *_drained(timeline)], key=lambda wait: (wait.rank, wait.start)))


def _drained(timeline: Timeline) -> Iterator[Idle]:
    for rank, end in enumerate(timeline.extent.end.tolist()):
        if timeline.makespan - end > ROUNDING * timeline.makespan:
            yield Idle(rank, end, timeline.makespan, "drained")


class _Moments(NamedTuple):
    """Of gaps: where the causes change from one to the next; the first begins the gap, the last ends it."""

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
    for number, cell in enumerate(runs[late].tolist()):
        rank, before = int(graph.rank[cell]), timeline.spans[cell].action
        maker = int(makers[number])
        action, source = (timeline.spans[maker].action, int(graph.rank[maker])) if maker != NONE else (None, None)
        word = "activation" if maker != NONE and graph.is_forward[timeline.critical[cell]] else "gradient"
        bounds = [float(moment[number]) - origin for moment in moments]
        until = float(ordered[number]) - origin
        causes = ("step", "dispatch", word, "unsent", "lane", "transfer", "lane")
        for cause, (begin, end) in zip(causes, pairwise(bounds), strict=True):
            if min(end, until) - begin > slack:
                yield Idle(rank, begin, min(end, until), cause, before, action, source)
        if bounds[-1] - until > slack:
            other = timeline.spans[int(could_run[number])].action
            yield Idle(rank, until, bounds[-1], "order", before, action, source, other)


def _moments(timeline: Timeline, cells: Ints, previous: Floats) -> _Moments:
    """When each of these cells may begin, and when what it waits for was made, sent and there, within its gap."""
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
        posted[received] = _posted(timeline)[sent]
        sets_out[received], arrives[received] = timeline.node_start[node], node_end[node]
    stepped, started = _may_begin(timeline, cells)
    moments = [previous]
    for moment in (stepped, started, made, posted, sets_out, arrives):
        moments.append(np.clip(moment, moments[-1], end))
    return _Moments._make([*moments, end])


def _may_begin(timeline: Timeline, cells: Ints) -> tuple[Floats, Floats]:
    """When the step before has ended for each of these cells, and when its rank has got to it."""
    graph, node_end = timeline.step_graph, timeline.node_start + timeline.node_duration
    stepped, started = np.zeros(graph.nodes), graph.release_times(timeline.costs)
    into_step = np.flatnonzero(graph.begins != NONE)
    np.maximum.at(stepped, graph.target[into_step], node_end[graph.source[into_step]])
    own = np.flatnonzero((graph.reason == PROGRAM) | (graph.begins != NONE))
    np.maximum.at(started, graph.target[own], node_end[graph.source[own]] + graph.delays(timeline.costs)[own])
    return stepped[cells], started[cells]


def _makers(timeline: Timeline, sent: Ints) -> Ints:
    """The cells that make what is sent in these cells."""
    actions = timeline.step_graph.actions
    sends = timeline.step_graph.first_action[sent]
    maker = np.full(len(sends), NONE, np.int64)
    for transfer in TRANSFERS:
        mine = np.flatnonzero(actions.is_kind(sends, transfer.send))
        maker[mine] = actions.find_any(transfer.made_by, actions.stage[sends[mine]], actions.microbatch[sends[mine]])
    return np.asarray(actions.cell[maker])


def _sent(timeline: Timeline, edges: Ints) -> Ints:
    """The cells of the sends whose receives these edges wait for."""
    graph = timeline.step_graph
    send = np.full(len(graph.actions), NONE, np.int64)
    send[graph.pairs.receive] = graph.pairs.send
    return np.asarray(graph.actions.cell[send[graph.events.awaited[edges]]])


def _posted(timeline: Timeline) -> Floats:
    """When the rank of every cell got to it; for sends and receives only."""
    graph = timeline.step_graph
    posted = graph.post_times(timeline.costs)
    edges = np.flatnonzero(graph.reason[: len(graph.events.waiting)] == POST)
    source = graph.source[edges]
    when = timeline.node_start[source] + timeline.node_duration[source] + graph.delays(timeline.costs)[edges]
    posted[graph.actions.cell[graph.events.waiting[edges]]] = when
    return posted


def _makers_of(timeline: Timeline, edges: Ints) -> Ints:
    """The cells on other ranks that make what these edges wait for; ``NONE`` if they do not wait for data."""
    graph = timeline.step_graph
    reasons = np.append(graph.reason, NOTHING)[edges]
    makers = np.full(len(edges), NONE, np.int64)
    makers[reasons == DATA] = graph.source[edges[reasons == DATA]]
    makers[reasons == USE] = _makers(timeline, _sent(timeline, edges[reasons == USE]))
    return makers


def _soonest_later(timeline: Timeline, late: Ints) -> tuple[Floats, Ints]:
    """For each of these blocking cells: when the first later one of its rank and step could run, and which."""
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
    """When everything that a cell needs has arrived at its rank; never for what does not compute."""
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
