"""Builds the graph of what takes time in a schedule and what waits for what, independent of the costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.action_table import NONE, ActionTable
from penstock.graph.comm_model import EAGER, CommModel
from penstock.graph.events import REASONS, event_graph, pair_transfers
from penstock.graph.start_times import Order, topological_order
from penstock.ir import packed
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    UNSHARD,
)
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.ir.schedule import Schedule
from penstock.lowering.rows import without_idle
from penstock.lowering.send_receive import send_receive
from penstock.simulation.link_costs import link_costs, link_numbers
from penstock.verification.check import verify, verify_structure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.graph.events import EventGraph, TransferPairs
    from penstock.simulation.costs import Costs

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: Transfers take time but do not contend with each other.
FREE: Final = CommModel(buffering=EAGER, lanes="message")

#: The reasons of the edges: those of the event graph, and that a step begins after the previous one.
PROGRAM, POST, LANE, USE, MESSAGE, ROOM, DATA, STEP = range(len(REASONS) + 1)

_IS_TRANSFER: Final = np.zeros(len(packed.TYPE_NUMBER) + 1, bool)
_IS_TRANSFER[[packed.TYPE_NUMBER[kind] for kind in TRANSFER_TYPES]] = True
_IS_COMPUTE: Final = np.zeros(len(packed.TYPE_NUMBER) + 1, bool)
_IS_COMPUTE[[packed.TYPE_NUMBER[kind] for kind in COMPUTE]] = True

#: The field of the costs that holds the duration of each type of action.
_TIMES: Final = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUT: "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
    UNSHARD: "unshard",
    REDUCE_GRAD: "reduce",
}


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A schedule that runs for some steps under a communication model, as a graph whose nodes take time.

    The nodes are the cells of all steps; then, for every step, the optimizer of every rank; then, if the steps are
    synchronised, the end of every step.

    Attributes:
        schedule: one step, without idle cells.
        model: how communication behaves.
        steps: the number of steps.
        synchronise: whether every rank waits for all others at the end of a step.
        actions: the actions of all steps.
        events: the event graph of their cells.
        source: for every edge, the node that it comes from; first those of ``events``, then those between steps.
        target: for every edge, the node that it goes to.
        reason: for every edge, its reason.
        begins: for every edge into the beginning of a step, the cell that it is for, otherwise ``NONE``.
        order: the graph in topological order.
    """

    schedule: Schedule
    model: CommModel
    steps: int
    synchronise: bool
    actions: ActionTable
    events: EventGraph
    source: Ints
    target: Ints
    reason: Ints
    begins: Ints
    order: Order

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.schedule.ranks

    @property
    def cells(self) -> int:
        """The number of cells in all steps."""
        return len(self.events.node)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.cells + self.steps * self.ranks + (self.steps if self.synchronise else 0)

    @cached_property
    def first_action(self) -> Ints:
        """The first action of each cell."""
        return (
            np.flatnonzero(np.append(True, np.diff(self.actions.cell) > 0)) if len(self.actions) else self.actions.cell
        )

    @cached_property
    def rank(self) -> Ints:
        """The rank of each cell."""
        return np.asarray(self.actions.rank[self.first_action])

    @cached_property
    def step(self) -> Ints:
        """The step of each cell."""
        lengths = np.diff(self.actions.first_cell) // self.steps
        within = np.arange(self.cells) - self.actions.first_cell[self.rank]
        return np.asarray(within // np.maximum(lengths[self.rank], 1))

    @cached_property
    def is_transfer(self) -> NDArray[np.bool_]:
        """Whether each cell is a send or a receive, which its rank posts without waiting."""
        return np.asarray(_IS_TRANSFER[self.actions.kind[self.first_action]])

    @cached_property
    def is_compute(self) -> NDArray[np.bool_]:
        """Whether each cell computes."""
        return np.asarray(_IS_COMPUTE[self.actions.kind[self.first_action]])

    @cached_property
    def blocking(self) -> Ints:
        """The cells that their rank runs itself, rank by rank in order."""
        return np.flatnonzero(~self.is_transfer)

    @cached_property
    def first_compute(self) -> Ints:
        """The first compute cell of each rank, ``NONE`` if there is none."""
        return self.last_of_ranks(self.computing[::-1])

    @cached_property
    def last_compute(self) -> Ints:
        """The last compute cell of each rank, ``NONE`` if there is none."""
        return self.last_of_ranks(self.computing)

    def last_of_ranks(self, cells: Ints) -> Ints:
        """Return the last of these cells for each rank, ``NONE`` if it has none of them."""
        last = np.full(self.ranks, NONE, np.int64)
        last[self.rank[cells]] = cells  # of several, the last stays
        return last

    @cached_property
    def before_compute(self) -> Ints:
        """The cells that a rank runs itself before it first computes."""
        return np.asarray(self.blocking[self.blocking < self.first_compute[self.rank[self.blocking]]])

    @cached_property
    def computing(self) -> Ints:
        """The compute cells, rank by rank in order."""
        return np.flatnonzero(self.is_compute)

    @cached_property
    def non_compute(self) -> Ints:
        """The cells that a rank runs itself but that do not compute."""
        return np.asarray(self.blocking[~self.is_compute[self.blocking]])

    @cached_property
    def is_forward(self) -> NDArray[np.bool_]:
        """Whether the waiting action of each edge of the event graph is a forward."""
        return self.actions.is_kind(self.events.waiting, FORWARD)

    @cached_property
    def pairs(self) -> TransferPairs:
        """The matching sends and receives."""
        return pair_transfers(self.actions)

    def durations(self, costs: Costs) -> Floats:
        """Return how long every node takes."""
        stages, actions = self.schedule.stages, self.actions
        times = np.zeros((len(packed.TYPE_NUMBER) + 1, stages))
        for kind, field in _TIMES.items():
            times[packed.TYPE_NUMBER[kind]] = costs.per_stage(field, stages)
        of_links = link_costs(costs, self.schedule)
        if self.schedule.is_chain:
            times[packed.TYPE_NUMBER[SEND_F], :-1] = of_links.forward.time
            times[packed.TYPE_NUMBER[SEND_B], 1:] = of_links.backward.time
        taken = np.asarray(times[actions.kind, actions.stage], np.float64)
        if not self.schedule.is_chain:
            for kind, messages in ((SEND_F, of_links.forward), (SEND_B, of_links.backward)):
                sends = actions.positions_of(kind)
                taken[sends] = messages.time[self._links_between(actions.stage[sends], self._peers(sends))]
        if len(self.first_action) < len(actions):
            parts = np.bincount(actions.cell)
            taken = np.asarray(np.bincount(actions.cell, taken) * np.where(parts > 1, costs.overlap, 1.0), np.float64)
        optimizer = costs.per_stage("optimizer", stages)
        of_rank = np.bincount(self.schedule.placement.rank_of, optimizer, self.ranks)
        ends = np.zeros(self.steps if self.synchronise else 0)
        return np.concatenate([taken, np.tile(of_rank, self.steps), ends])

    def delays(self, costs: Costs) -> Floats:
        """Return how long after the end of its source the target of every edge can start."""
        delay = np.zeros(len(self.source))
        between = np.flatnonzero(self.reason == DATA)
        if len(between):
            awaited, waiting = self.events.awaited[between], self.events.waiting[between]
            of_links = link_costs(costs, self.schedule)
            link = self._links_between(self.actions.stage[awaited], self.actions.stage[waiting])
            forward_time, backward_time = of_links.forward.time[link], of_links.backward.time[link]
            delay[between] = np.where(self.is_forward[between], forward_time, backward_time)
        if costs.dispatch:
            delay += costs.dispatch * self._dispatched
        return delay

    def _peers(self, transfers: Ints) -> Ints:
        return packed.peers(self.actions.codes[transfers])

    def _links_between(self, stage: Ints, other: Ints) -> Ints:
        """Return the links between these stages, whichever of the two is the source."""
        return link_numbers(self.schedule, np.minimum(stage, other), np.maximum(stage, other))

    @cached_property
    def _dispatched(self) -> Ints:
        """The number of actions that a rank starts along every edge, up to the target."""
        started = np.zeros(len(self.source), np.int64)
        inner = len(self.events.awaited)
        cell = self.actions.cell
        by_program = np.flatnonzero((self.reason[:inner] == PROGRAM) | (self.reason[:inner] == POST))
        started[by_program] = cell[self.events.waiting[by_program]] - cell[self.events.awaited[by_program]]
        into_step = np.flatnonzero(self.begins != NONE)
        started[into_step] = self.within_step[self.begins[into_step]] + 1
        return started

    @cached_property
    def within_step(self) -> Ints:
        """The index of each cell within its rank and step."""
        lengths = np.diff(self.actions.first_cell) // self.steps
        within: Ints = np.arange(self.cells) - self.actions.first_cell[self.rank] - self.step * lengths[self.rank]
        return within

    def post_times(self, costs: Costs) -> Floats:
        """Return when a rank gets to each of the leading cells of the first step; 0 for all others."""
        post = np.zeros(self.cells)
        if costs.dispatch:
            cells = self.leading_cells[self.step[self.leading_cells] == 0]
            post[cells] = costs.dispatch * (self.within_step[cells] + 1)
        return post

    def release_times(self, costs: Costs) -> Floats:
        """Return the earliest start of every node: its rank has to get to it, even if it waits for nothing."""
        release = np.zeros(self.nodes)
        if costs.dispatch:
            np.maximum.at(release, self.events.node, self.post_times(costs))
        return release

    @cached_property
    def leading_cells(self) -> Ints:
        """For every rank and step, the cells up to the first one that the rank runs itself."""
        group = self.rank * self.steps + self.step
        first = np.full(self.ranks * self.steps, self.cells, np.int64)
        first[group[self.blocking][::-1]] = self.blocking[::-1]
        return np.flatnonzero(np.arange(self.cells) <= first[group])


@lru_cache(maxsize=2)
def build_step_graph(schedule: Schedule, model: CommModel | None, steps: int, synchronise: bool) -> StepGraph:
    """Verify a schedule and build its graph. The last two graphs are cached, to be run with other costs.

    Raises:
        VerificationError: the schedule would not run.
    """
    verify_structure(schedule)
    one_step = without_idle(schedule)
    may_contend = model is not None and (model.lanes != "message" or model.capacity == 0)
    if may_contend and not ActionTable(one_step).has_transfers:
        verify(one_step)
        one_step = send_receive(one_step)  # contention needs explicit transfers: those that lowering would add
    actions = ActionTable(_repeated(one_step, steps))
    events = event_graph(actions, model or FREE)
    inner = np.full(len(events.reason), NONE, np.int32)
    edges = [(events.source, events.target, events.reason, inner)]
    edges.append(_between_steps(events, steps, synchronise=synchronise))
    source, target, reason, begins = (np.concatenate(arrays) for arrays in zip(*edges, strict=True))
    nodes = len(events.node) + steps * schedule.ranks + (steps if synchronise else 0)
    order = topological_order(nodes, source, target)
    if order is None:
        verify(schedule, model=model or FREE)
        raise ScheduleError(f"the schedule runs once, but {steps} consecutive steps deadlock (under {model or FREE})")
    for array in (
        source,
        target,
        reason,
        begins,
        events.node,
        events.awaited,
        events.waiting,
        events.reason,
        order.nodes,
        order.first,
        order.source,
        order.edge,
    ):
        array.setflags(write=False)  # cached, and shared by everything simulated with it
    return StepGraph(
        one_step, model or FREE, steps, synchronise, actions, events, source, target, reason, begins, order
    )


def _repeated(schedule: Schedule, steps: int) -> Schedule:
    """Return consecutive steps as one step with ``steps`` times as many microbatches."""
    if steps == 1:
        return schedule
    rows = []
    for rank in range(schedule.ranks):
        codes = schedule.codes_of(rank)
        later = (packed.microbatches(codes) >= 0) * schedule.microbatches
        rows.append(np.concatenate([packed.shift_microbatches(codes, later * step) for step in range(steps)]))
    edges = None if schedule.is_chain else schedule.edges
    microbatches = schedule.microbatches * steps
    return Schedule.from_codes(rows, placement=schedule.placement, microbatches=microbatches, edges=edges)


def _between_steps(events: EventGraph, steps: int, *, synchronise: bool) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the edges from the last action of a rank in a step to its optimizer, and from there to the next step.

    For the edges into a step, also return the cell that each is for: under rendezvous, the node of a receive is that of
    its send, on another rank.
    """
    actions, cells = events.actions, len(events.node)
    ranks = actions.schedule.ranks
    is_transfer = np.ones(cells, bool)
    is_transfer[actions.cell] = _IS_TRANSFER[actions.kind]
    edges: list[tuple[int, int, int]] = []
    for rank in range(ranks):
        begin, end = actions.first_cell[rank : rank + 2].tolist()
        length = (end - begin) // steps
        runs = np.flatnonzero(~is_transfer[begin : begin + length]).tolist()
        for step in range(steps):
            optimizer, barrier = cells + step * ranks + rank, cells + steps * ranks + step
            if runs:
                edges.append((begin + step * length + runs[-1], optimizer, NONE))
            if synchronise:
                edges.append((optimizer, barrier, NONE))
            if runs and step + 1 < steps:
                following = begin + (step + 1) * length
                leading = range(following, following + runs[0] + 1)
                edges += ((barrier if synchronise else optimizer, int(events.node[cell]), cell) for cell in leading)
    source, target, begins = np.array(edges, np.int32).reshape(-1, 3).T
    return source, target, np.full(len(edges), STEP, np.int8), begins
