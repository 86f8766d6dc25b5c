"""Add the transfers between ranks: a send right after what made it, its receive in the same order on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.leaves import NOWHERE, Leaves
from penstock.graph.sorting import order_by
from penstock.graph.walk import UNREACHED, longest_path
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFERS
from penstock.lowering.rows import without_idle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.ir.schedule import Schedule


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


def in_turns(schedule: Schedule) -> tuple[Schedule, NDArray[np.int64]]:
    """As ``send_receive``, and of every action when its turn is: whatever it waits for has an earlier one.

    A send and its receive have one turn, and so have the sub-actions of an overlap.
    """
    schedule = without_idle(schedule)
    leaves = Leaves(schedule)
    turn = _rounds(leaves)[leaves.cell] * schedule.ranks + leaves.rank
    codes, ranks, turns, places = [leaves.codes], [leaves.rank], [turn], [np.arange(len(leaves), dtype=np.int32)]
    for transfer in TRANSFERS:
        sent = leaves.are(*transfer.made_by)
        target = leaves.stage[sent] + transfer.stage_offset
        inside = (target >= 0) & (target < schedule.stages)
        sent, target = sent[inside], target[inside]
        away = leaves.home[target] != leaves.rank[sent]
        sent, target = sent[away], target[away]
        for kind, stage, rank in (
            (transfer.send, leaves.stage[sent], leaves.rank[sent]),
            (transfer.receive, target, leaves.home[target]),
        ):
            codes.append(packed.pack(stage, kind, leaves.microbatch[sent]))
            ranks.append(rank)
            turns.append(turn[sent])
            places.append(sent + len(leaves))  # in one turn: first the action, then what it sends, part by part
    rank_of, turn_of, place_of = np.concatenate(ranks), np.concatenate(turns), np.concatenate(places)
    order = order_by(rank_of, turn_of, place_of)
    when = turn_of * (len(leaves) + 1) + np.maximum(place_of - (len(leaves) - 1), 0)
    offsets = np.append(0, np.cumsum(np.bincount(rank_of, minlength=schedule.ranks)))
    return schedule.with_codes(np.concatenate(codes)[order], offsets), when[order]


def _rounds(leaves: Leaves) -> NDArray[np.int64]:
    """The round in which every cell gets its turn."""
    cells = int(leaves.cell[-1]) + 1 if len(leaves) else 0
    rank = np.zeros(cells, np.int32)
    rank[leaves.cell] = leaves.rank
    later = np.flatnonzero(rank[1:] == rank[:-1]).astype(np.int32) + np.int32(1)
    consumer, producer = leaves.inputs
    from_elsewhere = (producer != NOWHERE) & (leaves.rank[consumer] != leaves.rank[producer])
    consumer, producer = consumer[from_elsewhere], producer[from_elsewhere]
    # Within a round the lower rank comes first: what it makes, a higher one may use in the same round.
    wait = (leaves.rank[producer] > leaves.rank[consumer]).astype(np.int8)
    rounds = longest_path(
        cells,
        np.concatenate([later - 1, leaves.cell[producer]]),
        np.concatenate([later, leaves.cell[consumer]]),
        np.concatenate([np.ones(len(later), np.int8), wait]),
    )
    if (rounds == UNREACHED).any():
        raise ScheduleError("some action waits for ever, so there is no order for its transfers; check the schedule")
    return rounds
