"""Compiled: runs orders and fills gaps with weight gradients, as ``schedules/gap_filling.py`` does, in the same order.

There is one time per rank at which it looks next, and a tournament between them. That suffices: a rank that waits has
looked, and between then and the end of its wait a look changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


def fill_gaps(  # noqa: C901 - compiled
    order: Ints,
    order_first: Ints,
    first: Ints,
    limit: Floats,
    patience: float,
    hurried_from: Ints,
    awaits: Ints,
    delay: Floats,
    duration: Floats,
    change: Floats,
    owes: Ints,
    reader: Ints,
    dispatch: float,
) -> tuple[Ints, Ints, Floats, Floats, Floats]:
    """Return what ran, rank after rank, how many actions each rank ran, their peaks, and when they began and ended.

    ``order_first`` says where the order of each rank begins, ``first`` where there is room for what it runs.
    """
    ranks, actions = len(limit), len(owes)
    ran, owed = np.empty(first[ranks], np.int64), np.empty(first[ranks], np.int64)
    count, place = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    first_owed, last_owed = first[:-1].copy(), first[:-1].copy()
    held, peak = np.zeros(ranks), np.zeros(ranks)
    begin, end = np.full(ranks, -np.inf), np.full(ranks, -np.inf)
    ends = np.full(actions + 1, np.inf)
    ends[actions] = -np.inf
    leaves = 1
    while leaves < ranks:
        leaves *= 2
    looks, winner = np.full(leaves, np.inf), np.empty(2 * leaves, np.int64)
    looks[:ranks] = dispatch
    for leaf in range(leaves):
        winner[leaves + leaf] = leaf
    for node in range(leaves - 1, 0, -1):
        left, right = winner[2 * node], winner[2 * node + 1]
        winner[node] = left if looks[left] <= looks[right] else right
    while True:
        rank = winner[1]
        now = looks[rank]
        if now == np.inf:
            break
        action, later, woken = -1, np.inf, -1
        index = order_first[rank] + place[rank]
        owes_some = first_owed[rank] < last_owed[rank]
        fills = owes_some and index == order_first[rank + 1]
        if index < order_first[rank + 1]:
            due = order[index]
            ready = ends[awaits[due]] + delay[due]
            gap = ready - now
            if owes_some and held[rank] + change[due] > limit[rank]:
                fills = True
            elif owes_some and gap > 0:
                fills = place[rank] >= hurried_from[rank] or gap >= patience * duration[owed[first_owed[rank]]]
            if not fills and ready > now:
                later = ready
            elif not fills:
                action = due
                place[rank] += 1
        if fills:
            action = owed[first_owed[rank]]
            first_owed[rank] += 1
        if action >= 0:
            if count[rank] == 0:
                begin[rank] = now
            end[rank] = ends[action] = now + duration[action]
            ran[first[rank] + count[rank]] = action
            count[rank] += 1
            held[rank] += change[action]
            peak[rank] = max(peak[rank], held[rank])
            if owes[action] >= 0:
                owed[last_owed[rank]] = owes[action]
                last_owed[rank] += 1
            later = end[rank] + dispatch
            if reader[action] != rank and end[reader[action]] + dispatch <= now:
                woken = reader[action]  # it waits, and now knows for how long
        looks[rank] = later
        if woken >= 0:
            looks[woken] = now
        for changed in (rank, woken):
            node = (leaves + changed) // 2 if changed >= 0 else 0
            while node > 0:
                left, right = winner[2 * node], winner[2 * node + 1]
                winner[node] = left if looks[left] <= looks[right] else right
                node //= 2
    return ran, count, peak, begin, end
