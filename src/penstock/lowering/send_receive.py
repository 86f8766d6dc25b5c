"""Add the transfers between ranks: a send right after what made it, its receive in the same order on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.blocks import whole_rows
from penstock.graph.leaves import NOWHERE
from penstock.graph.sorting import order_by, stable_order
from penstock.graph.walk import UNREACHED, longest_path
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFERS
from penstock.lowering.rows import taken_apart

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.graph.leaves import Leaves, Places
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
    into its row: of a few rows that are sorted already, so that it takes the time of a merge.

    >>> from penstock.ir.schedule import Schedule
    >>> print(send_receive(Schedule([["0F0", "0B0"], ["1F0", "1B0"]])).grid())
    step   0        1        2        3
    rank 0 0F0      0SEND_F0 0RECV_B0 0B0
    rank 1 1RECV_F0 1F0      1B0      1SEND_B0
    """
    return in_turns(schedule)[0]


def in_turns(schedule: Schedule | Leaves) -> tuple[Schedule, NDArray[np.int64]]:
    """As ``send_receive``, and of every action when its turn is: whatever it waits for has an earlier one.

    A send and its receive have one turn, and so have the sub-actions of an overlap.
    """
    leaves = taken_apart(schedule)
    turn = _rounds(leaves)[leaves.cell] * leaves.schedule.ranks + leaves.rank
    transfers = _transfers(leaves)
    offsets = leaves.offsets + transfers.sent + transfers.received
    codes, when = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    for ranks in whole_rows(offsets.tolist()):
        within = slice(offsets[ranks.start], offsets[ranks.stop])
        codes[within], when[within] = _rows(leaves, turn, transfers, ranks)
    return leaves.schedule.with_codes(codes, offsets), when


class _Transfers(NamedTuple):
    """What goes to another rank.

    Attributes:
        made: where it is made, in order.
        receiver: the rank that it goes to.
        by_receiver: how to sort it by that.
        sent: how much of it the ranks before each one send, and at last all.
        received: the same for what they receive.
    """

    made: Places
    receiver: Places
    by_receiver: Places
    sent: Places
    received: Places


def _transfers(leaves: Leaves) -> _Transfers:
    made = leaves.are_in_range(*_MAKERS)
    receiver = leaves.home[leaves.stage[made] + _STAGE_OFFSET[leaves.kind[made]]]
    away = ((receiver != leaves.rank[made]) & (receiver != NOWHERE)).nonzero()[0]
    made, receiver = made[away], receiver[away]
    received = np.zeros(len(leaves.offsets), np.int64)
    np.bincount(receiver, minlength=leaves.schedule.ranks).cumsum(out=received[1:])
    return _Transfers(made, receiver, stable_order(receiver), made.searchsorted(leaves.offsets), received)


def _rows(leaves: Leaves, turn: Places, transfers: _Transfers, ranks: slice) -> tuple[Codes, NDArray[np.int64]]:
    """The rows of these ranks, one after the other, with their transfers in place; and when the turn of each is."""
    own, sent, received = (
        slice(bounds[ranks.start], bounds[ranks.stop])
        for bounds in (leaves.offsets, transfers.sent, transfers.received)
    )
    made_here, coming = transfers.made[sent], transfers.by_receiver[received]
    made_there = transfers.made[coming]
    rank_of = np.concatenate([leaves.rank[own], leaves.rank[made_here], transfers.receiver[coming]])
    place_of = np.concatenate([np.arange(own.start, own.stop), made_here, made_there])
    turn_of, is_added = turn[place_of], np.arange(len(place_of)) >= own.stop - own.start
    # In one turn: first the actions, then what they send, part by part.
    order = order_by(rank_of, turn_of, place_of + is_added * len(leaves))
    when = turn_of * (len(leaves) + 1) + is_added * (place_of + 1)
    codes = [leaves.codes[own], _sends(leaves.codes[made_here]), _receives(leaves.codes[made_there])]
    return np.concatenate(codes)[order], when[order]


def _sends(made: Codes) -> Codes:
    """The sends of what these actions make."""
    return packed.alone(made, _SEND[packed.types(made)])


def _receives(made: Codes) -> Codes:
    """The receives of it, on the stages that it goes to."""
    kind = packed.types(made)
    return packed.further(packed.alone(made, _RECEIVE[kind]), _STAGE_OFFSET[kind])


def _rounds(leaves: Leaves) -> NDArray[np.int64]:
    """The round in which every cell gets its turn."""
    rank = np.zeros(leaves.cells, np.int32)
    rank[leaves.cell] = leaves.rank
    earlier = (rank[1:] == rank[:-1]).nonzero()[0]
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
