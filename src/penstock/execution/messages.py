"""Finds the messages that an action sends, receives or uses, by the rule of ``ir/dependencies.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir.dependencies import TRANSFERS, Transfer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.ir.actions import Action, ComputationType

_BY_SEND: Final[Mapping[ComputationType, Transfer]] = {transfer.send: transfer for transfer in TRANSFERS}
_BY_RECEIVE: Final[Mapping[ComputationType, Transfer]] = {transfer.receive: transfer for transfer in TRANSFERS}
_BY_USER: Final[Mapping[ComputationType, Transfer]] = {
    kind: transfer for transfer in TRANSFERS for kind in transfer.needed_by
}


class Message(NamedTuple):
    """A transfer from one stage to its neighbour for one microbatch.

    >>> from penstock.ir.actions import Action
    >>> message = received_by(Action.from_str("2RECV_B5"))
    >>> message.source, message.target, message.receive
    (3, 2, '2RECV_B5')
    """

    transfer: Transfer
    source: int
    microbatch: int

    @property
    def target(self) -> int:
        """The stage that it goes to."""
        return self.source + self.transfer.stage_offset

    @property
    def receive(self) -> str:
        """The text of the action that receives it."""
        return f"{self.target}{self.transfer.receive}{self.microbatch}"

    def key(self, microbatches: int) -> int:
        """A unique number, in a pipeline with this number of microbatches."""
        return message_key(min(self.source, self.target), self.microbatch, microbatches, TRANSFERS.index(self.transfer))


def message_key(link: int, microbatch: int, microbatches: int, direction: int) -> int:
    """Number a message by the first of its two stages; activations (0) and gradients (1) alternate.

    >>> message_key(link=2, microbatch=5, microbatches=8, direction=1)
    43
    """
    return 2 * (link * microbatches + microbatch) + direction


def sent_by(action: Action) -> Message | None:
    """Find the message that an action sends, if it is a SEND."""
    transfer = _BY_SEND.get(action.computation_type)
    return None if transfer is None else Message(transfer, action.stage_index, action.microbatch_index or 0)


def received_by(action: Action) -> Message | None:
    """Find the message that an action receives, if it is a RECV."""
    transfer = _BY_RECEIVE.get(action.computation_type)
    if transfer is None:
        return None
    return Message(transfer, action.stage_index - transfer.stage_offset, action.microbatch_index or 0)


def used_by(action: Action) -> list[Message]:
    """Find the messages that a compute action uses, if they are sent at all; an overlap uses those of its parts.

    >>> from penstock.ir.actions import Action
    >>> [message.receive for message in used_by(Action.from_str("(2F5;7B3)OVERLAP_F_B"))]
    ['2RECV_F5', '7RECV_B3']
    """
    return [
        Message(transfer, part.stage_index - transfer.stage_offset, part.microbatch_index or 0)
        for part in action.parts
        if (transfer := _BY_USER.get(part.computation_type)) is not None
    ]
