"""Posts receives late, for platforms where a pending receive blocks other communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.graph.action_table import NONE
from penstock.graph.array_blocks import blocks, concatenate, row_blocks
from penstock.graph.sorting import stable_order
from penstock.ir import packed
from penstock.ir.actions import LARGEST_MICROBATCH
from penstock.ir.dependencies import TRANSFER_TYPES, TRANSFERS
from penstock.ir.numbers import whole_number
from penstock.lowering.rows import table_of

if TYPE_CHECKING:
    from penstock.graph.action_table import ActionTable, Positions
    from penstock.ir.schedule import Schedule

_SENDS: Final = tuple(transfer.send for transfer in TRANSFERS)


def defer_receives(schedule: Schedule | ActionTable, look_ahead: int | None = None) -> Schedule:
    """Post every receive right before the action that needs it, or ``look_ahead`` uses earlier.

    Without ``look_ahead``, the lower rank of a pair posts its receives before it sends to the other, so that the two
    never both wait to send; its receives may then be posted any number of uses ahead. With it, no more than
    ``look_ahead`` ever are. A receive is never posted earlier than before. O(n).

    >>> from penstock.ir.schedule import Schedule
    >>> defer_receives(Schedule([["1RECV_F0", "1RECV_F1", "1F0", "1F1"], ["0F0", "0F1", "0SEND_F0", "0SEND_F1"]],
    ...     )).actions[0]
    (1RECV_F0, 1F0, 1RECV_F1, 1F1)
    """
    return defer_with_turns(schedule, None, look_ahead)[0]


def defer_with_turns(
    schedule: Schedule | ActionTable, turns: Positions | None, look_ahead: int | None = None
) -> tuple[Schedule, Positions | None]:
    """Defer receives, and update the turns in which the actions happen, if known; see ``send_receive_with_turns``.

    A transfer whose receive is now posted later than it used to happen gets a turn after the preceding action.
    """
    if look_ahead is not None:
        look_ahead = whole_number("look_ahead", look_ahead, most=LARGEST_MICROBATCH)
    actions = table_of(schedule)
    order = np.empty(len(actions), np.int32)
    later = None if turns is None else turns.copy()
    for ranks in row_blocks(actions.offsets.tolist()):
        rows = _Rows.of(actions, slice(int(actions.offsets[ranks.start]), int(actions.offsets[ranks.stop])))
        position, in_place = rows.positions(look_ahead)
        order[rows.within] = rows.order(position, in_place)
        if later is not None:
            rows.postpone(position, later)
    deferred = actions.schedule.with_codes(_in_order(actions.codes, order), actions.offsets)
    return deferred, None if later is None else _in_order(later, order)


def _in_order(numbers: Positions, order: Positions) -> Positions:
    return concatenate([numbers[order[block]] for block in blocks(len(order))])


class _Rows(NamedTuple):
    """A range of consecutive ranks, and those of their receives that are used later.

    Positions are counted from the first action of these ranks.

    Attributes:
        actions: the actions of all ranks.
        within: the actions of these ranks.
        receive: the positions of the receives.
        user: the action that uses each.
        send: the matching send, as a position in ``actions``.
    """

    actions: ActionTable
    within: slice
    receive: Positions
    user: Positions
    send: Positions

    @classmethod
    def of(cls, actions: ActionTable, within: slice) -> _Rows:
        """Return the range of the ranks that these actions belong to."""
        receives, users, sends = [], [], []
        for transfer in actions.routes.transfers:
            mine = actions.positions_between(transfer.receive, within.start, within.stop, transfer.distance)
            slots = actions.slots_at(mine)
            user = actions.first_table(transfer.needed_by)[slots]
            good = ((user > mine) & (actions.rank[user] == actions.rank[mine])).nonzero()[0]
            receives.append(mine[good] - within.start)
            users.append(user[good] - within.start)
            sent = actions.table(transfer.send, transfer.distance)
            sends.append(sent[slots[good] - transfer.stage_offset * actions.stride])
        receive, user, send = map(np.concatenate, (receives, users, sends))
        if not actions.routes.is_chain:  # an action may use several, which then stay in order
            order = receive.argsort()
            receive, user, send = receive[order], user[order], send[order]
        return cls(actions, within, receive, user, send)

    @property
    def rank(self) -> Positions:
        """The rank of every action."""
        return np.asarray(self.actions.rank[self.within])

    def positions(self, look_ahead: int | None) -> tuple[Positions, Positions]:
        """Return before which action each receive goes, and the order among those before the same action."""
        cell, every = self.actions.cell[self.within], np.arange(len(self.rank))
        first_of_cell = np.maximum.accumulate(np.append(True, cell[1:] != cell[:-1])[: len(every)] * every)
        if look_ahead:
            wanted = self._ahead(look_ahead)
            return np.maximum(first_of_cell[wanted], self.receive), self.receive
        position = first_of_cell[self.user]
        if look_ahead == 0:
            return position, self.user
        flushed = self._next_send_to_a_higher_rank()[self.receive]
        return np.minimum(position, flushed), np.where(flushed <= position, self.receive, self.user)

    def order(self, position: Positions, in_place: Positions) -> Positions:
        """Return the new order of the actions, as positions in ``actions``."""
        count = len(self.rank)
        stays = np.ones(count, bool)
        stays[self.receive] = False
        ahead = stays.cumsum() - stays  # the number of earlier actions that stay
        by_place = stable_order(position * count + in_place)
        arrives = ahead[position[by_place]] + np.arange(len(by_place))
        order, others = np.empty(count, np.int64), np.ones(count, bool)
        others[arrives] = False
        order[arrives], order[others] = self.receive[by_place], stays.nonzero()[0]
        return np.asarray(order + self.within.start)

    def postpone(self, position: Positions, turns: Positions) -> None:
        """Move the turn of each transfer after that of the action that now precedes its receive."""
        blocking = ~packed.kind_mask(TRANSFER_TYPES).take(self.actions.kind[self.within])
        last = np.maximum.accumulate(np.where(blocking, np.arange(len(blocking)), NONE))
        ahead = np.append(NONE, last)[position]
        known = ((ahead != NONE) & (self.rank[ahead] == self.rank[self.receive])).nonzero()[0]
        receive, send = self.receive[known] + self.within.start, self.send[known]
        turns[receive] = np.maximum(turns[receive], turns[self.within][ahead[known]] + 1)
        turns[send] = turns[receive]

    def _ahead(self, look_ahead: int) -> Positions:
        """Return before which use each receive is posted: ``look_ahead`` uses earlier on its rank, if possible."""
        order = stable_order(self.user)
        user = self.user[order]
        posted = np.zeros(len(order), np.int64)
        posted[look_ahead:] = user[:-look_ahead]
        posted[self.rank[posted] != self.rank[user]] = 0
        wanted = np.empty_like(posted)
        wanted[order] = posted
        return wanted

    def _next_send_to_a_higher_rank(self) -> Positions:
        """Return for each receive from a higher rank the next send to that rank, or the end."""
        actions, rank, kind = self.actions, self.rank, self.actions.kind[self.within]
        peer = np.full(len(rank), NONE, np.int32)
        mine = packed.kind_mask(TRANSFER_TYPES).take(kind).nonzero()[0]
        other = packed.peers(actions.codes[mine + self.within.start])
        peer[mine] = actions.rank_of_stage[np.clip(other, NONE, actions.stages)]
        higher = (peer > rank).nonzero()[0]
        pair = (rank[higher] - rank[:1]).astype(np.int64) * actions.schedule.ranks + peer[higher]
        order = stable_order(pair)
        higher, pair = higher[order], pair[order]
        sends = packed.kind_mask(_SENDS).take(kind[higher])
        number = np.where(sends, np.arange(len(sends)), len(sends))
        following = np.minimum.accumulate(number[::-1])[::-1]
        same = np.append(pair, NONE)[following] == pair
        flushed = np.full(len(rank), len(rank))
        flushed[higher] = np.where(same, np.append(higher, len(rank))[following], len(rank))
        return flushed
