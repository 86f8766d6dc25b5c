"""Why a rank is idle: every moment in which it runs nothing, with what it waits for.

Before each action a rank may wait, in this order: until it has started so many actions (*dispatch*) or the step before
has ended everywhere (*step*); until another rank has made what the action needs (*activation* or *gradient*); until the
lane of the transfer is free (*lane*); while it is under way (*transfer*). From the moment on at which something later
in its own order could run, it is that order that keeps it idle (*order*). After its last action it is *drained*.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.graph.leaves import NOWHERE
from penstock.graph.timing import NOTHING
from penstock.ir.actions import COMPUTE, FORWARD
from penstock.ir.dependencies import TRANSFERS
from penstock.simulation.flow import DATA, POST, STEP, USE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.ir.actions import Action
    from penstock.simulation.timeline import Timeline

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: The share of the makespan below which a gap is not one: 0.1 + 0.2 is not quite 0.3.
ROUNDING: Final = 1e-12

CAUSES: Final = ("activation", "gradient", "transfer", "lane", "order", "dispatch", "step", "drained")


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
        if self.cause == "lane":
            return f"{self.before} waits for {what}, and its lane is busy"
        if self.cause == "transfer":
            return f"{self.before} waits for {what}, which is under way"
        return f"{self.before} waits for the {self.cause} that {self.awaited} makes on rank {self.source}"


def intervals(timeline: Timeline) -> tuple[Idle, ...]:
    """Every interval with its cause, rank by rank in order. Linear but for one search per interval."""
    return tuple(sorted([*_gaps(timeline), *_drained(timeline)], key=lambda wait: (wait.rank, wait.start)))


def _drained(timeline: Timeline) -> Iterator[Idle]:
    for rank, end in enumerate(timeline.rank_end.tolist()):
        if timeline.makespan - end > ROUNDING * timeline.makespan:
            yield Idle(rank, end, timeline.makespan, "drained")


class _Moments(NamedTuple):
    """Of gaps: where the causes change from one to the next, and the gap itself as the first and the last."""

    begin: Floats
    made: Floats
    sets_out: Floats
    arrives: Floats
    end: Floats


def _gaps(timeline: Timeline) -> Iterator[Idle]:
    flow, runs = timeline.flow, timeline.flow.blocking
    start = timeline.node_start[runs]
    ends = start + timeline.node_duration[runs]
    same_rank = np.append(False, flow.rank[runs][1:] == flow.rank[runs][:-1])
    previous = np.where(same_rank, np.append(0.0, ends[:-1]), timeline._origin)
    slack = ROUNDING * timeline.makespan
    late = np.flatnonzero(start > previous + slack)
    if not len(late):
        return
    cells, origin = runs[late], timeline._origin
    ready, could_run = _soonest_later(timeline, late)
    moments = _moments(timeline, cells, previous[late])
    for number, cell in enumerate(cells.tolist()):
        span, edge = timeline.spans[cell], int(timeline.critical[cell])
        made = _awaited(timeline, edge)
        bounds = [float(moment[number]) for moment in moments]
        ordered = bounds[-1] if made is None else min(max(float(ready[number]), bounds[0]), bounds[-1])
        first = made.word if made else "step" if edge != NOTHING and flow.reason[edge] == STEP else "dispatch"
        action, source = (made.action, made.rank) if made else (None, None)
        for cause, (begin, end) in zip((first, "lane", "transfer", "lane"), pairwise(bounds), strict=True):
            if min(end, ordered) - begin > slack:
                yield Idle(span.rank, begin - origin, min(end, ordered) - origin, cause, span.action, action, source)
        if bounds[-1] - ordered > slack:
            other = timeline.spans[int(could_run[number])].action
            yield Idle(span.rank, ordered - origin, bounds[-1] - origin, "order", span.action, action, source, other)


def _moments(timeline: Timeline, cells: Ints, previous: Floats) -> _Moments:
    """When what these cells wait for was made, set out and arrived, within the gap before each."""
    flow = timeline.flow
    end = timeline.node_start[cells]
    made, sets_out, arrives = end.copy(), end.copy(), end.copy()
    edges = timeline.critical[cells]
    reasons = np.append(flow.reason, NOTHING)[edges]

    between = np.flatnonzero(reasons == DATA)
    source = flow.source[edges[between]]
    made[between] = sets_out[between] = timeline.node_start[source] + timeline.node_duration[source]

    received = np.flatnonzero(reasons == USE)
    if len(received):
        sent = _sent(timeline, edges[received])
        node = flow.graph.node[sent]
        made[received] = _posted(timeline)[sent]
        sets_out[received] = timeline.node_start[node]
        arrives[received] = timeline.node_start[node] + timeline.node_duration[node]
    made, sets_out, arrives = (np.clip(moment, previous, end) for moment in (made, sets_out, arrives))
    return _Moments(previous, made, sets_out, arrives, end)


def _sent(timeline: Timeline, edges: Ints) -> Ints:
    """The cells of the sends whose receives these edges wait for."""
    flow = timeline.flow
    send = np.full(len(flow.leaves), NOWHERE, np.int64)
    send[flow.pairs.receive] = flow.pairs.send
    return np.asarray(flow.leaves.cell[send[flow.graph.awaited[edges]]])


def _posted(timeline: Timeline) -> Floats:
    """When the rank of every cell got to it; for sends and receives only."""
    flow = timeline.flow
    posted = flow.releases(timeline.costs)[: flow.cells]
    edges = np.flatnonzero(flow.reason[: len(flow.graph.waiting)] == POST)
    source = flow.source[edges]
    when = timeline.node_start[source] + timeline.node_duration[source] + flow.delays(timeline.costs)[edges]
    posted[flow.leaves.cell[flow.graph.waiting[edges]]] = when
    return posted


class _Made(NamedTuple):
    """What another rank makes: by which action, where, and the word for it."""

    action: Action
    rank: int
    word: str


def _awaited(timeline: Timeline, edge: int) -> _Made | None:
    """What an edge waits for, if it waits for data."""
    flow, leaves = timeline.flow, timeline.flow.leaves
    if edge == NOTHING or int(flow.reason[edge]) not in (USE, DATA):
        return None
    awaited, waiting = int(flow.graph.awaited[edge]), int(flow.graph.waiting[edge])
    forward = bool(leaves.is_kind(np.array([waiting]), FORWARD)[0])
    if flow.reason[edge] == USE:
        transfer = TRANSFERS[0 if forward else 1]
        stage = leaves.stage[[awaited]] - transfer.stage_offset
        awaited = int(leaves.find_any(transfer.made_by, stage, leaves.microbatch[[awaited]])[0])
    cell = int(leaves.cell[awaited])
    return _Made(timeline.spans[cell].action, int(flow.rank[cell]), "activation" if forward else "gradient")


def _soonest_later(timeline: Timeline, late: Ints) -> tuple[Floats, Ints]:
    """For each of these blocking cells: when the first later one of its rank and step could run, and which."""
    flow, runs = timeline.flow, timeline.flow.blocking
    ready = _ready(timeline)[runs]
    group = flow.rank[runs] * flow.steps + flow.step[runs]
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
    flow, leaves = timeline.flow, timeline.flow.leaves
    ready = np.full(flow.cells, np.inf)
    ready[leaves.cell[leaves.are(*COMPUTE)]] = 0.0
    waiting, awaited = leaves.inputs
    local = leaves.rank[waiting] == leaves.rank[awaited]
    source = leaves.cell[awaited[local]]
    np.maximum.at(ready, leaves.cell[waiting[local]], timeline.node_start[source] + timeline.node_duration[source])
    between, received = np.flatnonzero(flow.reason == DATA), np.flatnonzero(flow.reason == USE)
    for edges, source in ((between, flow.source[between]), (received, flow.graph.node[_sent(timeline, received)])):
        when = timeline.node_start[source] + timeline.node_duration[source] + flow.delays(timeline.costs)[edges]
        np.maximum.at(ready, flow.target[edges], when)
    return ready
