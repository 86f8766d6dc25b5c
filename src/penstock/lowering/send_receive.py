"""Add the transfers between ranks: a send right after what made it, its receive in the same order on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.leaves import NOWHERE
from penstock.graph.sorting import order_by
from penstock.graph.walk import UNREACHED, longest_path
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFERS
from penstock.lowering.rows import rebuilt, taken_apart

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
    ranks, count = leaves.schedule.ranks, len(leaves)
    turn = _rounds(leaves)[leaves.cell] * ranks + leaves.rank
    made, sends, receives, receivers = _transfers(leaves)
    code_of = np.concatenate([leaves.codes, sends, receives])
    rank_of = np.concatenate([leaves.rank, leaves.rank[made], receivers])
    place_of = np.concatenate([np.arange(count), made, made])
    turn_of, is_added = turn[place_of], np.arange(len(place_of)) >= count
    # In one turn: first the actions, then what they send, part by part.
    order = order_by(rank_of, turn_of, place_of + is_added * count)
    when = turn_of * (count + 1) + is_added * (place_of + 1)
    return rebuilt(leaves.schedule, code_of[order], rank_of[order]), when[order]


def _transfers(leaves: Leaves) -> tuple[Places, Codes, Codes, Places]:
    """Where what goes to another rank is made; the send and the receive of it, and the rank that receives."""
    made = leaves.are_in_range(*_MAKERS)
    kind = packed.types(leaves.codes[made])
    home = leaves.home[leaves.stage[made] + _STAGE_OFFSET[kind]]
    away = ((home != leaves.rank[made]) & (home != NOWHERE)).nonzero()[0]
    made, kind = made[away], kind[away]
    sends = packed.alone(leaves.codes[made], _SEND[kind])
    receives = packed.further(packed.alone(sends, _RECEIVE[kind]), _STAGE_OFFSET[kind])
    return made, sends, receives, home[away]


def _rounds(leaves: Leaves) -> NDArray[np.int64]:
    """The round in which every cell gets its turn."""
    rank = np.zeros(leaves.cells, np.int32)
    rank[leaves.cell] = leaves.rank
    earlier = (rank[1:] == rank[:-1]).nonzero()[0]
    consumer, producer = leaves.inputs
    here, there = leaves.rank[consumer], leaves.rank[producer]
    elsewhere = (here != there).nonzero()[0]
    consumer, producer = consumer[elsewhere], producer[elsewhere]
    # Within a round the lower rank comes first: what it makes, a higher one may use in the same round.
    rounds = longest_path(
        leaves.cells,
        np.concatenate([earlier, leaves.cell[producer]]),
        np.concatenate([earlier + 1, leaves.cell[consumer]]),
        np.concatenate([np.ones(len(earlier), bool), (there > here)[elsewhere]]).view(np.int8),
    )
    if (rounds == UNREACHED).any():
        raise ScheduleError("some action waits for ever, so there is no order for its transfers; check the schedule")
    return rounds
