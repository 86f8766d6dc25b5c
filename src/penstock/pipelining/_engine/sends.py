"""When a rank waits for what it has sent: as early as that costs no time, so that tensors are let go of.

Every action gets a level, later than that of all that it waits for. Before an action whose level is later than that of
the receive of a message elsewhere, the rank may wait for the end of the send: whatever waits for anything still has the
later level, so nothing can wait in a circle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.ir.actions import BACKWARD_INPUT, FORWARD, FULL_BACKWARD, RECV_B, RECV_F, SEND_B, SEND_F

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._schedule.actions import _Action

#: A message by its direction, the stage that it goes to, and its microbatch.
Message: TypeAlias = "tuple[ComputationType, int, int | None]"

#: By how much a level is later after a computation, and after anything else.
_COMPUTATION: Final = 1000
_OTHER: Final = 1
#: How far behind both ends of a message the wait for its send comes: it takes time, and ranks are not equally fast.
_SLACK: Final = 6 * _COMPUTATION


def ends_of_sends(rows: Mapping[int, Sequence[_Action]], rank: int) -> tuple[dict[int, list[int]], list[int]]:
    """For places of a rank's row the places of the sends to wait for before; and those to wait for at the end.

    An order in which something is missing, or that waits for ever, tells nothing: then all of them are at the end.
    """
    row = rows[rank]
    sends = [place for place, action in enumerate(row) if action.computation_type in (SEND_F, SEND_B)]
    walk = _Walk(rows)
    if not walk.reaches_the_end():
        return {}, sends
    before: dict[int, list[int]] = defaultdict(list)
    levels = walk.levels[rank]
    for send in sends:
        received = walk.received.get(_sent(row[send]))
        over = None if received is None else max(received, levels[send]) + _SLACK
        before[len(row) if over is None else bisect_right(levels, over)].append(send)
    return dict(before), before.pop(len(row), [])


def _sent(action: _Action) -> Message:
    stage, kind, microbatch, _ = action
    return (FORWARD, stage + 1, microbatch) if kind is SEND_F else (FULL_BACKWARD, stage - 1, microbatch)


def _used(action: _Action) -> list[Message]:
    """The messages that an action uses, if they are sent at all."""
    return [
        (FORWARD if kind is FORWARD else FULL_BACKWARD, stage, microbatch)
        for stage, kind, microbatch, _ in action.leaves
        if kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT)
    ]


class _Walk:
    """One run through an order; a rank runs until it has to wait, and is woken by the send that it waits for.

    Attributes:
        levels: of every rank the level of each action, ascending.
        received: the level of the receive of a message.
    """

    def __init__(self, rows: Mapping[int, Sequence[_Action]]) -> None:
        self.levels: dict[int, list[int]] = {rank: [] for rank in rows}
        self.received: dict[Message, int] = {}
        self._rows = rows
        self._sent: dict[Message, int | None] = {
            _sent(action): None
            for row in rows.values()
            for action in row
            if action.computation_type in (SEND_F, SEND_B)
        }
        self._sleepers: dict[Message, int] = {}

    def reaches_the_end(self) -> bool:
        """Give levels; whether that could be done."""
        awake = list(self._rows)
        while awake:
            awake += self._advance(awake.pop())
        return all(len(self.levels[rank]) == len(row) for rank, row in self._rows.items())

    def _advance(self, rank: int) -> list[int]:
        """Run this rank until it must wait; the ranks that it woke."""
        row, levels = self._rows[rank], self.levels[rank]
        woken: list[int] = []
        while len(levels) < len(row):
            action = row[len(levels)]
            level = levels[-1] if levels else 0
            for message in _used(action):
                sent = self._sent.get(message, 0)
                if sent is None:
                    self._sleepers[message] = rank
                    return woken
                level = max(level, sent)
            level += _COMPUTATION if action.is_compute else _OTHER
            levels.append(level)
            stage, kind, microbatch, _ = action
            if kind in (RECV_F, RECV_B):
                self.received[FORWARD if kind is RECV_F else FULL_BACKWARD, stage, microbatch] = level
            if action.computation_type in (SEND_F, SEND_B):
                self._sent[_sent(action)] = level
                woken += [self._sleepers.pop(_sent(action))] if _sent(action) in self._sleepers else []
        return woken
