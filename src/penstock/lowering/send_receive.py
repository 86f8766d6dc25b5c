"""Adds transfers between ranks: a send right after its producer, the receive in the same order on the other rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.action_table import NONE
from penstock.graph.array_blocks import blocks, concatenate, index_dtype, row_blocks
from penstock.graph.longest_path import UNREACHED, longest_path
from penstock.graph.sorting import order_by, stable_order
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFERS
from penstock.lowering.rows import table_of

if TYPE_CHECKING:
    from penstock.graph.action_table import ActionTable, Positions
    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule

#: By type number, whether the output of such an action is sent, in which direction, and by which types of transfer.
_IS_MAKER: Final = packed.kind_mask(tuple(kind for transfer in TRANSFERS for kind in transfer.made_by))
_DIRECTION, _SEND, _RECEIVE = np.zeros((3, len(packed.TYPE_NUMBER) + 1), np.int64)
for _transfer in TRANSFERS:
    _numbers = [packed.TYPE_NUMBER[kind] for kind in _transfer.made_by]
    _DIRECTION[_numbers] = _transfer.stage_offset
    _SEND[_numbers], _RECEIVE[_numbers] = (packed.TYPE_NUMBER[kind] for kind in (_transfer.send, _transfer.receive))


def send_receive(schedule: Schedule) -> Schedule:
    """Add sends and receives for everything that another rank needs; none between stages on the same rank.

    The ranks take turns, one action per round where they can. A rank that produces something for another rank places
    its own send and the other's receive at once. So the receives of a rank are in an order that its senders can keep,
    early enough for the actions that need them. The rounds are longest paths, and one sort puts everything into its
    row; it merges a few rows that are already sorted. O(n).

    >>> from penstock.ir.schedule import Schedule
    >>> print(send_receive(Schedule([["0F0", "0B0"], ["1F0", "1B0"]])).grid())
    step   0        1        2        3
    rank 0 0F0      0SEND_F0 0RECV_B0 0B0
    rank 1 1RECV_F0 1F0      1B0      1SEND_B0
    """
    return send_receive_with_turns(schedule)[0]


def send_receive_with_turns(schedule: Schedule | ActionTable) -> tuple[Schedule, Positions]:
    """Add transfers like ``send_receive``, and return the turn of every action: what it waits for has an earlier one.

    A send and its receive share a turn, and so do the sub-actions of an overlap.
    """
    actions = table_of(schedule)
    transfers = _transfers(actions)
    rounds = _rounds(actions, transfers)
    offsets = actions.offsets + transfers.sent + transfers.received
    latest = (int(rounds.max(initial=0)) + 1) * actions.schedule.ranks * (transfers.most_at_once + 1)
    codes = np.empty(offsets[-1], np.int64)
    turns = np.empty(offsets[-1], index_dtype(int(offsets[-1])) if latest < 2**31 else np.int64)
    for ranks in row_blocks(offsets.tolist()):
        within = slice(offsets[ranks.start], offsets[ranks.stop])
        codes[within], turns[within] = _rows(actions, rounds, transfers, ranks)
    return actions.schedule.with_codes(codes, offsets), turns


class _Transfers(NamedTuple):
    """The tensors that go to another rank.

    Attributes:
        made: the positions of the actions that produce them, in order; of several from one action, the nearest first.
        distance: how many stages further each goes; or 1 for all, in a chain.
        number: the index of each among those of its cell; or 0 for all, if no cell can have several.
        most_at_once: the most that any cell can have.
        receiver: the rank that each goes to.
        by_receiver: the order by receiver.
        sent: how many the ranks before each one send, and finally all of them.
        received: the same for receives.
    """

    made: Positions
    distance: Positions | int
    number: Positions | int
    most_at_once: int
    receiver: Positions
    by_receiver: Positions
    sent: Positions
    received: Positions


def _transfers(actions: ActionTable) -> _Transfers:
    distance: Positions | int = 1
    if actions.routes.is_chain:
        made, receiver = _made_in_chain(actions)
    else:
        made, receiver, distance = _made_for_links(actions)
    received = np.zeros(len(actions.offsets), np.int64)
    np.bincount(receiver, minlength=actions.schedule.ranks).cumsum(out=received[1:])
    sent, order = made.searchsorted(actions.offsets), stable_order(receiver)
    number, most_at_once = _numbers_in_cells(actions, made)
    return _Transfers(made, distance, number, most_at_once, receiver, order, sent, received)


def _made_in_chain(actions: ActionTable) -> tuple[Positions, Positions]:
    """Return the actions whose output goes to another rank, in order, and that rank."""
    makers, receivers = [], []
    for block in blocks(len(actions)):
        made = _IS_MAKER.take(actions.kind[block]).nonzero()[0] + block.start
        if not actions.all_in_range:
            made = made[actions.in_range[made]]
        receiver = actions.rank_of_stage[actions.stages_at(made) + _DIRECTION[actions.kind[made]]]
        away = ((receiver != actions.rank[made]) & (receiver != NONE)).nonzero()[0]
        makers.append(made[away].astype(index_dtype(len(actions)), copy=False))
        receivers.append(receiver[away])
    return concatenate(makers), concatenate(receivers)


def _made_for_links(actions: ActionTable) -> tuple[Positions, Positions, Positions]:
    """Return the same, an action once for every link that it serves, and how many stages further each goes."""
    makers, receivers, distances = [], [], []
    for transfer in actions.routes.transfers:
        made, senders = actions.positions_in_range(*transfer.made_by), actions.routes.senders(transfer)
        assert senders is not None  # it is not a chain
        made = made[senders[actions.stages_at(made)]]
        receiver = actions.rank_of_stage[actions.stages_at(made) + transfer.stage_offset]
        away = (receiver != actions.rank[made]).nonzero()[0]
        makers.append(made[away])
        receivers.append(receiver[away])
        distances.append(np.full(len(away), transfer.distance))
    made, distance = np.concatenate(makers), np.concatenate(distances)
    order = order_by(made, distance)  # what goes to the nearest stage is needed first
    return made[order].astype(index_dtype(len(actions)), copy=False), np.concatenate(receivers)[order], distance[order]


def _numbers_in_cells(actions: ActionTable, made: Positions) -> tuple[Positions | int, int]:
    """Return the index of each transfer among those of its cell, and more than the largest."""
    if actions.routes.is_chain and actions.cells == len(actions):
        return 0, 1
    cell = actions.cell[made]
    begins = np.append(True, cell[1:] != cell[:-1])[: len(cell)].nonzero()[0]
    number = np.arange(len(cell)) - begins.repeat(np.diff(np.append(begins, len(cell))))
    return number, int(number.max(initial=0)) + 1


def _rows(actions: ActionTable, rounds: Positions, transfers: _Transfers, ranks: slice) -> tuple[Codes, Positions]:
    """Return the rows of these ranks, concatenated, with their transfers, and the turn of every action."""
    own, sent, received = (
        slice(bounds[ranks.start], bounds[ranks.stop])
        for bounds in (actions.offsets, transfers.sent, transfers.received)
    )
    made_here, coming = transfers.made[sent], transfers.by_receiver[received]
    made_there = transfers.made[coming]
    place_of = np.concatenate([np.arange(own.start, own.stop), made_here, made_there])
    # Within a turn: first the actions, then what they send, sub-action by sub-action.
    turns = rounds[actions.cell[place_of]] * actions.schedule.ranks + actions.rank[place_of]
    turns *= transfers.most_at_once + 1
    turns[own.stop - own.start :] += 1
    if not isinstance(transfers.number, int):
        turns[own.stop - own.start :] += np.concatenate([transfers.number[sent], transfers.number[coming]])
    order = order_by(
        np.concatenate([actions.rank[own], actions.rank[made_here], transfers.receiver[coming]]) - ranks.start, turns
    )
    sends, distance = _sends(actions.codes[made_here]), transfers.distance
    if not isinstance(distance, int):
        sends, distance = packed.add_hops(sends, distance[sent] - 1), distance[coming]
    receives = _receives(actions.codes[made_there], distance)
    return np.concatenate([actions.codes[own], sends, receives])[order], turns[order]


def _sends(made: Codes) -> Codes:
    """Return the sends of what these actions produce."""
    return packed.with_kinds(made, _SEND[packed.types(made)])


def _receives(made: Codes, distance: Positions | int) -> Codes:
    """Return the receives of what these actions produce, on the stages that it goes to, this far away; 1 in a chain."""
    kind = packed.types(made)
    receives = packed.with_kinds(made, _RECEIVE[kind])
    if isinstance(distance, int):
        return packed.shift_stages(receives, _DIRECTION[kind])
    return packed.add_hops(packed.shift_stages(receives, _DIRECTION[kind] * distance), distance - 1)


def _ends(actions: ActionTable, transfers: _Transfers) -> tuple[Positions, Positions]:
    """Return the actions that produce and that need what is transferred, as far as both exist."""
    made = transfers.made
    direction = _DIRECTION[actions.kind[made]]
    slots = actions.slots_at(made) + direction * transfers.distance * actions.stride
    of_values, of_gradients = (actions.first_table(transfer.needed_by)[slots] for transfer in TRANSFERS)
    needed = np.where(direction > 0, of_values, of_gradients)
    away = ((needed != NONE) & (actions.rank[needed] != actions.rank[made])).nonzero()[0]
    return made[away], needed[away]


def _rounds(actions: ActionTable, transfers: _Transfers) -> Positions:
    """Return the round in which every cell gets its turn."""
    has_next = np.ones(actions.cells, bool)  # another cell of the same rank follows
    has_next[actions.cell[actions.offsets[actions.offsets > 0] - 1]] = False
    earlier = has_next.nonzero()[0]
    producer, consumer = _ends(actions, transfers)
    # Within a round, lower ranks come first: a higher rank may use their output in the same round.
    rounds = longest_path(
        actions.cells,
        np.concatenate([earlier, actions.cell[producer]], dtype=np.int32),
        np.concatenate([earlier + 1, actions.cell[consumer]], dtype=np.int32),
        np.concatenate([np.ones(len(earlier), bool), actions.rank[producer] > actions.rank[consumer]]).view(np.int8),
    )
    if (rounds == UNREACHED).any():
        raise ScheduleError("the compute actions deadlock, so transfers cannot be placed; run check() on the schedule")
    return rounds
