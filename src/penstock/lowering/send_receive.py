"""Add the transfers between ranks: a send right after what made it, its receive in the same order on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.action_table import NOWHERE
from penstock.graph.array_blocks import blocks, number_type, together, whole_rows
from penstock.graph.longest_path import UNREACHED, longest_path
from penstock.graph.sorting import order_by, stable_order
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFERS
from penstock.lowering.rows import taken_apart

if TYPE_CHECKING:
    from penstock.graph.action_table import Leaves, Places
    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule

#: The types of actions that make what is sent; and by the number of such a type to which stage, and how.
_MAKERS: Final = tuple(kind for transfer in TRANSFERS for kind in transfer.made_by)
_STAGE_OFFSET, _SEND, _RECEIVE = np.zeros((3, len(packed.TYPE_NUMBER) + 1), np.int64)
for _transfer in TRANSFERS:
    _numbers = [packed.TYPE_NUMBER[kind] for kind in _transfer.made_by]
    _STAGE_OFFSET[_numbers] = _transfer.stage_offset
    _SEND[_numbers], _RECEIVE[_numbers] = (packed.TYPE_NUMBER[kind] for kind in (_transfer.send, _transfer.receive))


def send_receive(schedule: Schedule) -> Schedule:
    """Sends and receives for everything that goes to another rank; none between stages on one rank.

    The ranks take turns, one action a round where they can; whoever makes something that another rank needs puts its
    own send and the other's receive into place at once. So the receives of a rank are in an order that its senders can
    keep, early enough for what needs them. The rounds are the longest paths of the order, and one sort puts everything
    into its row: of a few rows that are sorted already, so that it takes the time of a merge. O(n).

    >>> from penstock.ir.schedule import Schedule
    >>> print(send_receive(Schedule([["0F0", "0B0"], ["1F0", "1B0"]])).grid())
    step   0        1        2        3
    rank 0 0F0      0SEND_F0 0RECV_B0 0B0
    rank 1 1RECV_F0 1F0      1B0      1SEND_B0
    """
    return in_turns(schedule)[0]


def in_turns(schedule: Schedule | Leaves) -> tuple[Schedule, Places]:
    """As ``send_receive``, and of every action when its turn is: whatever it waits for has an earlier one.

    A send and its receive have one turn, and so have the sub-actions of an overlap.
    """
    leaves = taken_apart(schedule)
    rounds, transfers = _rounds(leaves), _transfers(leaves)
    offsets = leaves.offsets + transfers.sent + transfers.received
    latest = (int(rounds.max(initial=0)) + 1) * leaves.schedule.ranks * (transfers.most_at_once + 1)
    codes = np.empty(offsets[-1], np.int64)
    turns = np.empty(offsets[-1], np.int32 if latest <= np.iinfo(np.int32).max else np.int64)
    for ranks in whole_rows(offsets.tolist()):
        within = slice(offsets[ranks.start], offsets[ranks.stop])
        codes[within], turns[within] = _rows(leaves, rounds, transfers, ranks)
    return leaves.schedule.with_codes(codes, offsets), turns


class _Transfers(NamedTuple):
    """What goes to another rank.

    Attributes:
        made: where it is made, in order.
        number: which of the sub-actions of its overlap makes it, counted from 0; or 0 for all, if there is no overlap.
        most_at_once: how many sub-actions an overlap has at most.
        receiver: the rank that it goes to.
        by_receiver: how to sort it by that.
        sent: how much of it the ranks before each one send, and at last all.
        received: the same for what they receive.
    """

    made: Places
    number: Places | int
    most_at_once: int
    receiver: Places
    by_receiver: Places
    sent: Places
    received: Places


def _transfers(leaves: Leaves) -> _Transfers:
    makers, receivers = [], []
    for block in blocks(len(leaves)):
        made = packed.kind_mask(_MAKERS).take(leaves.kind[block]).nonzero()[0] + block.start
        if not leaves.all_in_range:
            made = made[leaves.in_range[made]]
        receiver = leaves.home[leaves.stages_at(made) + _STAGE_OFFSET[leaves.kind[made]]]
        away = ((receiver != leaves.rank[made]) & (receiver != NOWHERE)).nonzero()[0]
        makers.append(made[away].astype(number_type(len(leaves)), copy=False))
        receivers.append(receiver[away])
    made, receiver = together(makers), together(receivers)
    received = np.zeros(len(leaves.offsets), np.int64)
    np.bincount(receiver, minlength=leaves.schedule.ranks).cumsum(out=received[1:])
    sent, order = made.searchsorted(leaves.offsets), stable_order(receiver)
    if leaves.cells == len(leaves):
        return _Transfers(made, 0, 1, receiver, order, sent, received)
    first = np.append(True, leaves.cell[1:] != leaves.cell[:-1]).nonzero()[0]  # of each cell
    most_at_once = int(np.bincount(leaves.cell).max())
    return _Transfers(made, made - first[leaves.cell[made]], most_at_once, receiver, order, sent, received)


def _rows(leaves: Leaves, rounds: Places, transfers: _Transfers, ranks: slice) -> tuple[Codes, Places]:
    """The rows of these ranks, one after the other, with their transfers in place; and when the turn of each is."""
    own, sent, received = (
        slice(bounds[ranks.start], bounds[ranks.stop])
        for bounds in (leaves.offsets, transfers.sent, transfers.received)
    )
    made_here, coming = transfers.made[sent], transfers.by_receiver[received]
    made_there = transfers.made[coming]
    place_of = np.concatenate([np.arange(own.start, own.stop), made_here, made_there])
    # In one turn: first the actions, then what they send, part by part.
    turns = rounds[leaves.cell[place_of]] * leaves.schedule.ranks + leaves.rank[place_of]
    turns *= transfers.most_at_once + 1
    turns[own.stop - own.start :] += 1
    if not isinstance(transfers.number, int):
        turns[own.stop - own.start :] += np.concatenate([transfers.number[sent], transfers.number[coming]])
    order = order_by(
        np.concatenate([leaves.rank[own], leaves.rank[made_here], transfers.receiver[coming]]) - ranks.start, turns
    )
    codes = [leaves.codes[own], _sends(leaves.codes[made_here]), _receives(leaves.codes[made_there])]
    return np.concatenate(codes)[order], turns[order]


def _sends(made: Codes) -> Codes:
    """The sends of what these actions make."""
    return packed.with_kinds(made, _SEND[packed.types(made)])


def _receives(made: Codes) -> Codes:
    """The receives of it, on the stages that it goes to."""
    kind = packed.types(made)
    return packed.shift_stages(packed.with_kinds(made, _RECEIVE[kind]), _STAGE_OFFSET[kind])


def _rounds(leaves: Leaves) -> Places:
    """The round in which every cell gets its turn."""
    behind = np.ones(leaves.cells, bool)  # another cell of the same rank
    behind[leaves.cell[leaves.offsets[leaves.offsets > 0] - 1]] = False
    earlier = behind.nonzero()[0]
    consumer, producer = leaves.inputs_from_elsewhere()
    # Within a round the lower rank comes first: what it makes, a higher one may use in the same round.
    rounds = longest_path(
        leaves.cells,
        np.concatenate([earlier, leaves.cell[producer]], dtype=np.int32),
        np.concatenate([earlier + 1, leaves.cell[consumer]], dtype=np.int32),
        np.concatenate([np.ones(len(earlier), bool), leaves.rank[producer] > leaves.rank[consumer]]).view(np.int8),
    )
    if (rounds == UNREACHED).any():
        raise ScheduleError("some action waits for ever, so there is no order for its transfers; check the schedule")
    return rounds
