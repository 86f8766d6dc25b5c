"""Orders receives like the sends: only the order identifies messages between two ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from penstock.execution.messages import received_by, sent_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.execution.messages import Message
    from penstock.pipelining._schedule.rows import LoweredRows


def in_order_of_sends(rows: LoweredRows, rank_of: Mapping[int, int]) -> LoweredRows:
    """Move some receives ahead, so that those from one rank are in the order of its sends. O(n).

    A receive that would get the message of another is posted right after that one.
    """
    sent = _sent(rows, rank_of)
    ordered: LoweredRows = {}
    for rank, row in rows.items():
        receives = {message: action for action in row if (message := received_by(action)) is not None}
        posted: set[Message] = set()
        ordered[rank] = []
        for action in row:
            wanted = received_by(action)
            if wanted is None:
                ordered[rank].append(action)
                continue
            waiting = sent[rank_of[wanted.source], rank]
            while wanted not in posted:
                message = waiting.popleft() if waiting else wanted
                if message in receives:
                    posted.add(message)
                    ordered[rank].append(receives[message])
    return ordered


def _sent(rows: LoweredRows, rank_of: Mapping[int, int]) -> dict[tuple[int, int], deque[Message]]:
    """List what is sent, in order, by sender and receiver."""
    sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    for rank, row in rows.items():
        for message in filter(None, map(sent_by, row)):
            sent[rank, rank_of[message.target]].append(message)
    return sent
