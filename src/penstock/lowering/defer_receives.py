"""Post receives late: where a pending receive is in the way of other communication, as on some platforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.graph.action_table import NOWHERE
from penstock.graph.array_blocks import blocks, together, whole_rows
from penstock.graph.sorting import stable_order
from penstock.ir import packed
from penstock.ir.actions import LARGEST_INDEX
from penstock.ir.dependencies import TRANSFER_TYPES, TRANSFERS
from penstock.ir.numbers import whole_number
from penstock.lowering.rows import taken_apart

if TYPE_CHECKING:
    from penstock.graph.action_table import Leaves, Places
    from penstock.ir.schedule import Schedule

_SENDS: Final = tuple(transfer.send for transfer in TRANSFERS)


def defer_receives(schedule: Schedule | Leaves, look_ahead: int | None = None) -> Schedule:
    """Every receive right before the action that needs it; or as many uses earlier as ``look_ahead`` says.

    Without ``look_ahead`` the lower rank of a pair posts its receives before it sends to the other, lest both wait to
    send; so they may be posted any number of uses ahead. With it, no more than so many ever are, whatever happens
    between. A receive never moves ahead of where it was. O(n).

    >>> from penstock.ir.schedule import Schedule
    >>> defer_receives(Schedule([["1RECV_F0", "1RECV_F1", "1F0", "1F1"], ["0F0", "0F1", "0SEND_F0", "0SEND_F1"]],
    ...     )).actions[0]
    (1RECV_F0, 1F0, 1RECV_F1, 1F1)
    """
    return in_time(schedule, None, look_ahead)[0]


def in_time(
    schedule: Schedule | Leaves, turns: Places | None, look_ahead: int | None = None
) -> tuple[Schedule, Places | None]:
    """As ``defer_receives``; and if the turns are known in which the actions happen, see ``in_turns``, those as well.

    A transfer that happened before its receive is posted now happens right after the action before that.
    """
    if look_ahead is not None:
        look_ahead = whole_number("look_ahead", look_ahead, most=LARGEST_INDEX)
    leaves = taken_apart(schedule)
    order = np.empty(len(leaves), np.int32)
    later = None if turns is None else turns.copy()
    for ranks in whole_rows(leaves.offsets.tolist()):
        rows = _Rows.of(leaves, slice(int(leaves.offsets[ranks.start]), int(leaves.offsets[ranks.stop])))
        place, in_place = rows.places(look_ahead)
        order[rows.within] = rows.order(place, in_place)
        if later is not None:
            rows.postpone(place, later)
    deferred = leaves.schedule.with_codes(_in_order(leaves.codes, order), leaves.offsets)
    return deferred, None if later is None else _in_order(later, order)


def _in_order(numbers: Places, order: Places) -> Places:
    return together([numbers[order[block]] for block in blocks(len(order))])


class _Rows(NamedTuple):
    """Some ranks, one after the other, and those of their receives that are used later on.

    Places are counted from the first action of these ranks.

    Attributes:
        leaves: the actions of all ranks.
        within: those of these ranks.
        receive: where the receives are.
        user: the action that uses each.
        send: its other side, as a place in ``leaves``.
    """

    leaves: Leaves
    within: slice
    receive: Places
    user: Places
    send: Places

    @classmethod
    def of(cls, leaves: Leaves, within: slice) -> _Rows:
        """The ranks whose actions these are."""
        receives, users, sends = [], [], []
        for transfer in TRANSFERS:
            mine = leaves.are_between(transfer.receive, within.start, within.stop)
            slots = leaves.slots_at(mine)
            user = leaves.table_of_any(transfer.needed_by)[slots]
            good = ((user > mine) & (leaves.rank[user] == leaves.rank[mine])).nonzero()[0]
            receives.append(mine[good] - within.start)
            users.append(user[good] - within.start)
            sends.append(leaves.table(transfer.send)[slots[good] - transfer.stage_offset * leaves.stride])
        return cls(leaves, within, np.concatenate(receives), np.concatenate(users), np.concatenate(sends))

    @property
    def rank(self) -> Places:
        """The rank of every action."""
        return np.asarray(self.leaves.rank[self.within])

    def places(self, look_ahead: int | None) -> tuple[Places, Places]:
        """Before which action each receive comes; and what decides between several that come before the same one."""
        cell, every = self.leaves.cell[self.within], np.arange(len(self.rank))
        first_of_cell = np.maximum.accumulate(np.append(True, cell[1:] != cell[:-1])[: len(every)] * every)
        if look_ahead:
            wanted = self._ahead(look_ahead)
            return np.maximum(first_of_cell[wanted], self.receive), self.receive
        place = first_of_cell[self.user]
        if look_ahead == 0:
            return place, self.user
        flushed = self._next_send_to_a_higher_rank()[self.receive]
        return np.minimum(place, flushed), np.where(flushed <= place, self.receive, self.user)

    def order(self, place: Places, in_place: Places) -> Places:
        """Where what comes now stood, one action after the other, in ``leaves``."""
        count = len(self.rank)
        stays = np.ones(count, bool)
        stays[self.receive] = False
        ahead = stays.cumsum() - stays  # how many stand before each place and stay
        by_place = stable_order(place * count + in_place)
        arrives = ahead[place[by_place]] + np.arange(len(by_place))
        order, others = np.empty(count, np.int64), np.ones(count, bool)
        others[arrives] = False
        order[arrives], order[others] = self.receive[by_place], stays.nonzero()[0]
        return np.asarray(order + self.within.start)

    def postpone(self, place: Places, turns: Places) -> None:
        """Let the turn of each transfer be behind that of the action before which its receive was moved away."""
        blocking = ~packed.kind_mask(TRANSFER_TYPES).take(self.leaves.kind[self.within])
        last = np.maximum.accumulate(np.where(blocking, np.arange(len(blocking)), NOWHERE))
        ahead = np.append(NOWHERE, last)[place]
        known = ((ahead != NOWHERE) & (self.rank[ahead] == self.rank[self.receive])).nonzero()[0]
        receive, send = self.receive[known] + self.within.start, self.send[known]
        turns[receive] = np.maximum(turns[receive], turns[self.within][ahead[known]] + 1)
        turns[send] = turns[receive]

    def _ahead(self, look_ahead: int) -> Places:
        """Before which use each receive is posted: that of the receive so many uses earlier on its rank, or none."""
        order = stable_order(self.user)
        user = self.user[order]
        posted = np.zeros(len(order), np.int64)
        posted[look_ahead:] = user[:-look_ahead]
        posted[self.rank[posted] != self.rank[user]] = 0
        wanted = np.empty_like(posted)
        wanted[order] = posted
        return wanted

    def _next_send_to_a_higher_rank(self) -> Places:
        """For each receive from a higher rank the next send to it, or beyond the end."""
        leaves, rank, kind = self.leaves, self.rank, self.leaves.kind[self.within]
        peer = np.full(len(rank), NOWHERE, np.int32)
        for transfer in TRANSFERS:
            for type_, offset in ((transfer.send, transfer.stage_offset), (transfer.receive, -transfer.stage_offset)):
                mine = (kind == packed.TYPE_NUMBER[type_]).nonzero()[0]
                other = leaves.stages_at(mine + self.within.start) + offset
                peer[mine] = leaves.home[np.clip(other, NOWHERE, leaves.stages)]
        higher = (peer > rank).nonzero()[0]
        pair = (rank[higher] - rank[:1]).astype(np.int64) * leaves.schedule.ranks + peer[higher]
        order = stable_order(pair)
        higher, pair = higher[order], pair[order]
        sends = packed.kind_mask(_SENDS).take(kind[higher])
        number = np.where(sends, np.arange(len(sends)), len(sends))
        following = np.minimum.accumulate(number[::-1])[::-1]
        same = np.append(pair, NOWHERE)[following] == pair
        flushed = np.full(len(rank), len(rank))
        flushed[higher] = np.where(same, np.append(higher, len(rank))[following], len(rank))
        return flushed
