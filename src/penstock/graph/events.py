"""Builds the graph of what waits for what when a schedule runs under a communication model.

A node is a cell of the schedule. Under rendezvous a send and its receive are one event and share the node of the send.
Every edge has a reason:

- *program*: a rank runs its compute and sharding actions one after the other;
- *post*: a transfer is posted when the rank gets to it, after the action before it;
- *lane*: an operation queues behind the one before it in its lane;
- *use*: an action needs what a receive brings;
- *message*: a receive needs what was sent (unless the two are one event);
- *room*: a send needs room in its lane, which an earlier receive frees (if the lane is bounded);
- *data*: an action needs the output of another rank (in a schedule without transfers).

Mistakes that other checks report have no edges: missing actions, and actions before what they need on the same rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.graph import array_blocks as blocks
from penstock.graph.action_table import NONE, ActionTable
from penstock.graph.sorting import order_by
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFER_TYPES, TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.comm_model import CommModel

    Ints = NDArray[np.signedinteger[Any]]

_NONE: Final = np.empty(0, np.int64)
_SENDS: Final = tuple(transfer.send for transfer in TRANSFERS)

REASONS: Final = ("program", "post", "lane", "use", "message", "room", "data")


class Edges(NamedTuple):
    """Edges with the same reason: the positions of the awaited and of the waiting actions."""

    reason: str
    awaited: Ints
    waiting: Ints


@dataclass(frozen=True, slots=True)
class EventGraph:
    """The graph: edges go from what is awaited to what waits.

    Attributes:
        actions: the actions.
        node: the node of every cell.
        awaited: for every edge, the position of the action that is awaited.
        waiting: for every edge, the position of the action that waits.
        reason: for every edge, the index of its reason in ``REASONS``.
    """

    actions: ActionTable
    node: Ints
    awaited: Ints
    waiting: Ints
    reason: NDArray[np.int8]

    @property
    def source(self) -> Ints:
        """The node that each edge comes from."""
        return np.asarray(self.node[self.actions.cell[self.awaited]])

    @property
    def target(self) -> Ints:
        """The node that each edge goes to."""
        return np.asarray(self.node[self.actions.cell[self.waiting]])


@dataclass(frozen=True, slots=True)
class TransferPairs:
    """The positions of matching sends and receives."""

    send: Ints
    receive: Ints


def pair_transfers(actions: ActionTable) -> TransferPairs:
    """Pair every correctly placed send with its receive on another rank; leave out those without one."""
    if not actions.has_transfers:
        return TransferPairs(_NONE, _NONE)
    sends, receives = [], []
    for transfer in actions.routes.transfers:
        sent = actions.table(transfer.send, transfer.distance)
        slots = (sent != NONE).nonzero()[0]
        received = actions.table(transfer.receive, transfer.distance)
        sends.append(sent[slots])
        receives.append(received[slots + transfer.stage_offset * actions.stride])
    send, receive = np.concatenate(sends), np.concatenate(receives)
    pairs = _are_matched(actions, send, receive).nonzero()[0]
    return TransferPairs(send[pairs], receive[pairs])


def _are_matched(actions: ActionTable, operation: Ints, partner: Ints) -> NDArray[np.bool_]:
    """Return whether the partner exists, both are on the ranks of their stages, and the ranks differ."""
    good = (partner != NONE) & (actions.rank[partner] != actions.rank[operation])
    if not actions.all_placed:
        good &= actions.is_placed(operation) & actions.is_placed(partner)
    return np.asarray(good)


@dataclass(frozen=True, slots=True)
class RankRange:
    """A range of consecutive ranks: what happens on them, and the edges to it.

    Attributes:
        actions: the actions of all ranks.
        begin: the position of the first action of these ranks.
        end: the position after their last action.
        operation: the sends and receives on these ranks that match one on another rank.
        partner: the matching operation of each.
    """

    actions: ActionTable
    begin: int
    end: int
    operation: Ints
    partner: Ints

    @classmethod
    def all_of(cls, actions: ActionTable, pairs: TransferPairs) -> RankRange:
        """Return the range of all ranks."""
        operation, partner = np.concatenate([pairs.send, pairs.receive]), np.concatenate([pairs.receive, pairs.send])
        return cls(actions, 0, len(actions), operation, partner)

    @classmethod
    def between(cls, actions: ActionTable, begin: int, end: int) -> RankRange:
        """Return the range of the ranks whose actions are between these positions."""
        operations, partners = [_NONE], [_NONE]
        for transfer in actions.routes.transfers:
            send, receive, offset = transfer.send, transfer.receive, transfer.stage_offset * actions.stride
            distance = transfer.distance
            for kind, other, further in ((send, receive, offset), (receive, send, -offset)):
                mine = actions.positions_between(kind, begin, end, distance)
                slots = actions.slots_at(mine)
                partner = actions.table(other, distance)[slots + further]
                first = actions.table(kind, distance)[slots] == mine
                good = (_are_matched(actions, mine, partner) & first).nonzero()[0]
                operations.append(mine[good])
                partners.append(partner[good])
        return cls(actions, begin, end, np.concatenate(operations), np.concatenate(partners))

    @property
    def sends(self) -> NDArray[np.bool_]:
        """Which operations are sends."""
        return packed.kind_mask(_SENDS).take(self.actions.kind[self.operation])

    def edges(self, model: CommModel) -> Iterator[Edges]:
        """Yield all edges to what happens on these ranks."""
        yield from _program_edges(self)
        yield from _use_edges(self)
        if self.actions.has_transfers:
            yield from _communication_edges(self, model)


def rank_ranges(actions: ActionTable) -> Iterator[RankRange]:
    """Yield ranges of ranks whose actions fill a block."""
    if len(actions) <= blocks.SIZE:
        yield RankRange.all_of(actions, pair_transfers(actions))
        return
    for ranks in blocks.row_blocks(actions.offsets.tolist()):
        yield RankRange.between(actions, int(actions.offsets[ranks.start]), int(actions.offsets[ranks.stop]))


def event_graph(actions: ActionTable, model: CommModel) -> EventGraph:
    """Build the graph of a schedule under a model. O(n log n)."""
    pairs = pair_transfers(actions)
    node = np.arange(actions.cells, dtype=np.int32)
    if model.capacity == 0:
        node[actions.cell[pairs.receive]] = actions.cell[pairs.send]
    edges = [*RankRange.all_of(actions, pairs).edges(model)]
    return EventGraph(
        actions,
        node,
        np.concatenate([awaited for _, awaited, _ in edges]),
        np.concatenate([waiting for _, _, waiting in edges]),
        np.array([REASONS.index(reason) for reason, _, _ in edges], np.int8).repeat(
            [len(awaited) for _, awaited, _ in edges]
        ),
    )


def _communication_edges(part: RankRange, model: CommModel) -> Iterator[Edges]:
    """Yield the edges that the communication model adds."""
    if model.capacity != 0:
        receives = ~part.sends
        yield Edges("message", part.partner[receives], part.operation[receives])
    if model.lanes == "message":
        return
    if model.capacity:
        yield _capacity_edges(part, model.capacity)
    yield _lanes(part, model.lanes)


def _program_edges(part: RankRange) -> list[Edges]:
    """Return edges between consecutive actions of a rank, and from an action to the transfers posted after it."""
    actions, operation = part.actions, part.operation
    are_blocking = ~packed.kind_mask(TRANSFER_TYPES).take(actions.kind[part.begin : part.end])
    blocking = are_blocking.nonzero()[0] + part.begin
    cell, rank = actions.cell[blocking], actions.rank[blocking]
    in_a_row = ((cell[1:] != cell[:-1]) & (rank[1:] == rank[:-1])).nonzero()[0]
    number = are_blocking.cumsum()[operation - part.begin] - 1
    ahead = blocking[number] if len(blocking) else number
    posted = ((number != NONE) & (actions.rank[ahead] == actions.rank[operation])).nonzero()[0]
    return [
        Edges("program", blocking[in_a_row], blocking[in_a_row + 1]),
        Edges("post", ahead[posted], operation[posted]),
    ]


def _use_edges(part: RankRange) -> Iterator[Edges]:
    """Yield edges from receives to later actions that use them; without transfers, from other ranks' actions."""
    actions = part.actions
    if not actions.has_transfers:
        waiting, awaited = actions.remote_inputs()
        within = (waiting >= part.begin) & (waiting < part.end)
        yield Edges("data", awaited[within], waiting[within])
        return
    for transfer in TRANSFERS:
        mine = part.operation[actions.is_kind(part.operation, transfer.receive).nonzero()[0]]
        user = actions.first_table(transfer.needed_by)[actions.slots_at(mine)]
        good = ((user > mine) & (actions.rank[user] == actions.rank[mine])).nonzero()[0]
        yield Edges("use", mine[good], user[good])


def _lanes(part: RankRange, lanes: str) -> Edges:
    """Return edges between consecutive operations of a lane."""
    actions, operation = part.actions, part.operation
    lane = actions.rank[operation]
    if lanes != "rank":
        lane = lane * actions.schedule.ranks + actions.rank[part.partner]
    if lanes == "direction":
        lane = lane * 2 + part.sends
    order = order_by(lane, operation)
    lane, operation = lane[order], operation[order]
    ahead = (lane[1:] == lane[:-1]).nonzero()[0]
    return Edges("lane", operation[ahead], operation[ahead + 1])


def _capacity_edges(part: RankRange, capacity: int) -> Edges:
    """Return edges from the n-th receive between two ranks to the send that needs its buffer, ``capacity`` later."""
    actions, sends = part.actions, part.sends
    send, receive = part.operation[sends], part.partner[sends]
    channel = actions.rank[send] * actions.schedule.ranks + actions.rank[receive]
    by_send, by_receive = order_by(channel, send), order_by(channel, receive)
    count = max(0, len(channel) - capacity)
    same = channel[by_send][capacity:] == channel[by_send][:count]
    return Edges("room", receive[by_receive][:count][same], send[by_send][capacity:][same])
