"""What waits for what when a schedule runs under a communication model: nodes, and edges with the reason for each.

A node is a cell of the schedule. Under rendezvous a send and its receive are one event, and share the node of the send.
The edges are

- *program*: a rank runs its compute and sharding actions one after the other;
- *post*: a transfer is posted when the rank gets to it, after the action before it;
- *lane*: an operation stands in line behind the one before it in its lane;
- *use*: an action needs what a receive brings;
- *message*: a receive needs what was sent (if the two are not one event);
- *room*: a send needs room in its lane, which an earlier receive makes (if the lane is bounded);
- *data*: an action needs what another rank makes (in a schedule without transfers).

No edge stands for what another check reports: an action that is missing, or before what it needs on its own rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.graph.leaves import NOWHERE, Leaves
from penstock.graph.sorting import order_by
from penstock.ir.dependencies import OPERATIONS, TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.models import CommModel

    Ints = NDArray[np.signedinteger[Any]]

_NONE: Final = np.empty(0, np.int64)

REASONS: Final = ("program", "post", "lane", "use", "message", "room", "data")


@dataclass(frozen=True, slots=True)
class EventGraph:
    """The graph: edges go from what is awaited to what waits.

    Attributes:
        leaves: the actions.
        node: the node of every cell.
        awaited: for every edge the place in ``leaves`` of the action that is awaited.
        waiting: for every edge the place of the action that waits.
        reason: for every edge the place of its reason in ``REASONS``.
    """

    leaves: Leaves
    node: Ints
    awaited: Ints
    waiting: Ints
    reason: NDArray[np.int8]

    @property
    def source(self) -> Ints:
        """The node that each edge comes from."""
        return np.asarray(self.node[self.leaves.cell[self.awaited]])

    @property
    def target(self) -> Ints:
        """The node that each edge goes to."""
        return np.asarray(self.node[self.leaves.cell[self.waiting]])


@dataclass(frozen=True, slots=True)
class Matches:
    """The sends and receives that belong together, one pair per place."""

    send: Ints
    receive: Ints


def matches(leaves: Leaves) -> Matches:
    """Every send on its own rank whose receive is there too, on another rank."""
    if not leaves.has_transfers:
        return Matches(_NONE, _NONE)
    sends, receives = [], []
    for transfer in TRANSFERS:
        sent = leaves.table(transfer.send)
        slots = (sent != NOWHERE).nonzero()[0]
        sends.append(sent[slots])
        receives.append(leaves.table(transfer.receive)[slots + transfer.stage_offset * leaves.stride])
    send, receive = np.concatenate(sends), np.concatenate(receives)
    good = (receive != NOWHERE) & (leaves.rank[receive] != leaves.rank[send])
    if not leaves.all_at_home:
        good &= leaves.is_at_home(send) & leaves.is_at_home(receive)
    pairs = good.nonzero()[0]
    return Matches(send[pairs], receive[pairs])


def event_graph(leaves: Leaves, model: CommModel) -> EventGraph:
    """The graph of a schedule under a model. O(n log n)."""
    pairs = matches(leaves)
    node = np.arange(leaves.cells, dtype=np.int32)
    if model.capacity == 0:
        node[leaves.cell[pairs.receive]] = leaves.cell[pairs.send]
    edges = [*_program(leaves, pairs), *_uses(leaves, pairs)]
    if leaves.has_transfers:
        edges += _communication(leaves, pairs, model)
    return EventGraph(
        leaves,
        node,
        np.concatenate([awaited for _, awaited, _ in edges]),
        np.concatenate([waiting for _, _, waiting in edges]),
        np.array([REASONS.index(reason) for reason, _, _ in edges], np.int8).repeat(
            [len(awaited) for _, awaited, _ in edges]
        ),
    )


def _communication(leaves: Leaves, pairs: Matches, model: CommModel) -> Iterator[tuple[str, Ints, Ints]]:
    """What the model makes operations wait for."""
    if model.capacity != 0:
        yield "message", pairs.send, pairs.receive
    if model.lanes == "message":
        return
    if model.capacity:
        yield "room", *_room(leaves, pairs, model.capacity)
    yield "lane", *_lanes(leaves, pairs, model.lanes)


def _program(leaves: Leaves, pairs: Matches) -> list[tuple[str, Ints, Ints]]:
    """A rank's own actions in a row, and its transfers each behind the action before it."""
    blocks = ~leaves.is_among(OPERATIONS)
    blocking = blocks.nonzero()[0]
    cell, rank = leaves.cell[blocking], leaves.rank[blocking]
    in_a_row = ((cell[1:] != cell[:-1]) & (rank[1:] == rank[:-1])).nonzero()[0]
    operations = np.concatenate([pairs.send, pairs.receive])
    number = blocks.cumsum()[operations] - 1
    ahead = blocking[number] if len(blocking) else number
    posted = ((number != NOWHERE) & (leaves.rank[ahead] == leaves.rank[operations])).nonzero()[0]
    return [
        ("program", blocking[in_a_row], blocking[in_a_row + 1]),
        ("post", ahead[posted], operations[posted]),
    ]


def _uses(leaves: Leaves, pairs: Matches) -> list[tuple[str, Ints, Ints]]:
    """What needs a receive that stands before it; without any transfer, what needs something of another rank."""
    if not leaves.has_transfers:
        waiting, awaited = leaves.inputs
        elsewhere = (awaited != NOWHERE) & (leaves.rank[awaited] != leaves.rank[waiting])
        return [("data", awaited[elsewhere], waiting[elsewhere])]
    found = []
    for transfer in TRANSFERS:
        mine = pairs.receive[leaves.is_kind(pairs.receive, transfer.receive).nonzero()[0]]
        user = leaves.table_of_any(transfer.needed_by)[leaves.slot[mine]]
        good = ((user > mine) & (leaves.rank[user] == leaves.rank[mine])).nonzero()[0]
        found.append(("use", mine[good], user[good]))
    return found


def _lanes(leaves: Leaves, pairs: Matches, lanes: str) -> tuple[Ints, Ints]:
    """Every operation behind the one before it in its lane."""
    operations = np.concatenate([pairs.send, pairs.receive])
    peers = np.concatenate([leaves.rank[pairs.receive], leaves.rank[pairs.send]])
    lane = leaves.rank[operations]
    if lanes != "rank":
        lane = lane * leaves.schedule.ranks + peers
    if lanes == "direction":
        lane = lane * 2 + (np.arange(len(operations)) < len(pairs.send))
    order = order_by(lane, operations)
    lane, operations = lane[order], operations[order]
    ahead = (lane[1:] == lane[:-1]).nonzero()[0]
    return operations[ahead], operations[ahead + 1]


def _room(leaves: Leaves, pairs: Matches, capacity: int) -> tuple[Ints, Ints]:
    """The n-th send of one rank to another waits for the receive of as many before it as the lane does not hold."""
    channel = leaves.rank[pairs.send] * leaves.schedule.ranks + leaves.rank[pairs.receive]
    by_send, by_receive = order_by(channel, pairs.send), order_by(channel, pairs.receive)
    count = max(0, len(channel) - capacity)
    same = channel[by_send][capacity:] == channel[by_send][:count]
    return pairs.receive[by_receive][:count][same], pairs.send[by_send][capacity:][same]
