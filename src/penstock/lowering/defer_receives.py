"""Post receives late: where a pending receive is in the way of other communication, as on some platforms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.leaves import NOWHERE
from penstock.graph.sorting import order_by
from penstock.ir.actions import LARGEST_INDEX
from penstock.ir.dependencies import TRANSFERS
from penstock.ir.numbers import whole_number
from penstock.lowering.rows import rebuilt, taken_apart

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.graph.leaves import Leaves
    from penstock.ir.schedule import Schedule


def defer_receives(schedule: Schedule | Leaves, look_ahead: int | None = None) -> Schedule:
    """Every receive right before the action that needs it; or as many uses earlier as ``look_ahead`` says.

    Without ``look_ahead`` the lower rank of a pair posts its receives before it sends to the other, lest both wait to
    send; so they may be posted any number of uses ahead. With it, no more than so many ever are, whatever happens
    between. A receive never moves ahead of where it was. O(n log n).

    >>> from penstock.ir.schedule import Schedule
    >>> defer_receives(Schedule([["1RECV_F0", "1RECV_F1", "1F0", "1F1"], ["0F0", "0F1", "0SEND_F0", "0SEND_F1"]],
    ...     )).actions[0]
    (1RECV_F0, 1F0, 1RECV_F1, 1F1)
    """
    if look_ahead is not None:
        look_ahead = whole_number("look_ahead", look_ahead, most=LARGEST_INDEX)
    leaves = taken_apart(schedule)
    #: Everything stands before the place that sets it off; a receive before its trigger, and the trigger itself last.
    trigger = np.arange(len(leaves))
    first_of_cell = np.searchsorted(leaves.cell, leaves.cell)
    order_at_trigger = np.arange(len(leaves)) + len(leaves)
    receives, user = _uses(leaves)
    wanted = _ahead(leaves, receives, user, look_ahead or 0)
    place = np.maximum(first_of_cell[wanted], receives)
    flushed = np.full(len(receives), len(leaves))
    if look_ahead is None:
        flushed = _next_send_to_a_higher_rank(leaves, receives)
        place = np.minimum(place, flushed)
    trigger[receives] = place
    order_at_trigger[receives] = np.where((place == flushed) | (wanted != user), receives, user)
    order = order_by(trigger, order_at_trigger)
    return rebuilt(leaves.schedule, leaves.codes[order], leaves.rank[order])


def _uses(leaves: Leaves) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every receive that is used after it stands, and the action that uses it."""
    receives, users = [], []
    for transfer in TRANSFERS:
        mine = leaves.are_in_range(transfer.receive)
        user = leaves.find_any(transfer.needed_by, leaves.stage[mine], leaves.microbatch[mine])
        good = (user != NOWHERE) & (user > mine) & (leaves.rank[user] == leaves.rank[mine])
        receives.append(mine[good])
        users.append(user[good])
    return np.concatenate(receives), np.concatenate(users)


def _ahead(leaves: Leaves, receives: NDArray[np.int64], user: NDArray[np.int64], look_ahead: int) -> NDArray[np.int64]:
    """Before which use each receive is posted: that of the receive so many uses earlier on its rank."""
    if look_ahead == 0 or not len(receives):
        return user
    order = np.argsort(user, kind="stable")
    earlier = np.arange(len(order)) - look_ahead
    same_rank = (earlier >= 0) & (leaves.rank[user[order]][np.maximum(earlier, 0)] == leaves.rank[user[order]])
    posted = np.empty_like(user)
    posted[order] = np.where(same_rank, user[order][np.maximum(earlier, 0)], 0)
    return np.where(leaves.rank[posted] == leaves.rank[receives], posted, receives)


def _next_send_to_a_higher_rank(leaves: Leaves, receives: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each receive from a higher rank the next send to it, or beyond the end."""
    ranks = leaves.schedule.ranks
    peer = np.full(len(leaves), NOWHERE, np.int64)
    for transfer in TRANSFERS:
        for kind, offset in ((transfer.send, transfer.stage_offset), (transfer.receive, -transfer.stage_offset)):
            mine = leaves.are(kind)
            other = leaves.stage[mine] + offset
            inside = (other >= 0) & (other < leaves.schedule.stages)
            peer[mine[inside]] = leaves.home[other[inside]]
    pair = leaves.rank.astype(np.int64) * ranks + peer
    sends = leaves.are(*(transfer.send for transfer in TRANSFERS))
    sends = sends[peer[sends] > leaves.rank[sends]]
    keys = np.sort(pair[sends] * len(leaves) + sends)
    at = np.searchsorted(keys, pair[receives] * len(leaves) + receives)
    found = np.append(keys, np.iinfo(np.int64).max)[at]
    return np.where(found // len(leaves) == pair[receives], found % len(leaves), len(leaves))
