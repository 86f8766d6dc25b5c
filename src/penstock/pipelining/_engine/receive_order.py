"""Orders receives like the sends: only the order identifies messages between two ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from penstock.ir.dependencies import TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._schedule.rows import LoweredRows

    Message = tuple[int, ComputationType, int | None]

_BY_SEND = {transfer.send: transfer for transfer in TRANSFERS}
_BY_RECEIVE = {transfer.receive: transfer for transfer in TRANSFERS}


def in_order_of_sends(rows: LoweredRows, rank_of: Mapping[int, int]) -> LoweredRows:
    """Move some receives ahead, so that those from one rank are in the order of its sends. O(n).

    A receive that would get the message of another is posted right after that one.
    """
    sent = _sent(rows, rank_of)
    ordered: LoweredRows = {}
    for rank, row in rows.items():
        receives = {action[:3]: action for action in row if action.computation_type in _BY_RECEIVE}
        posted: set[Message] = set()
        ordered[rank] = []
        for action in row:
            transfer = _BY_RECEIVE.get(action.computation_type)
            if transfer is None:
                ordered[rank].append(action)
                continue
            waiting = sent[rank_of[action.stage_index - transfer.stage_offset], rank]
            while action[:3] not in posted:
                message = waiting.popleft() if waiting else action[:3]
                if message in receives:
                    posted.add(message)
                    ordered[rank].append(receives[message])
    return ordered


def _sent(rows: LoweredRows, rank_of: Mapping[int, int]) -> dict[tuple[int, int], deque[Message]]:
    """By sender and receiver, what is received of what is sent, in order."""
    sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    for rank, row in rows.items():
        for action in row:
            if (transfer := _BY_SEND.get(action.computation_type)) is not None:
                stage = action.stage_index + transfer.stage_offset
                sent[rank, rank_of[stage]].append((stage, transfer.receive, action.microbatch_index))
    return sent
