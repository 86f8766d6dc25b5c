"""Finds the messages that an action sends, receives or uses, by the rule of ``ir/dependencies.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir.actions import Action
from penstock.ir.dependencies import TRANSFERS, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, TypeVar

    import numpy as np
    from numpy.typing import NDArray

    from penstock.ir.actions import ComputationType
    from penstock.ir.edges import Link

    #: The number of each link, by its source and its target.
    LinkNumbers = Mapping[tuple[int, int], int]
    Numbers = TypeVar("Numbers", int, NDArray[np.signedinteger[Any]])

_BY_SEND: Final[Mapping[ComputationType, Transfer]] = {transfer.send: transfer for transfer in TRANSFERS}
_BY_RECEIVE: Final[Mapping[ComputationType, Transfer]] = {transfer.receive: transfer for transfer in TRANSFERS}
_BY_USER: Final[Mapping[ComputationType, Transfer]] = {
    kind: transfer for transfer in TRANSFERS for kind in transfer.needed_by
}


class Message(NamedTuple):
    """A transfer from one stage to another for one microbatch.

    >>> message = received_by(Action.from_str("2RECV_B5"))
    >>> message.source, message.target, message.receive
    (3, 2, '2RECV_B5')
    >>> sent_by(Action.from_str("3SEND_B5@0")).receive
    '0RECV_B5@3'
    """

    transfer: Transfer
    source: int
    target: int
    microbatch: int

    @property
    def link(self) -> tuple[int, int]:
        """The source and the target of the link that it goes over; a gradient goes from the latter to the former."""
        return min(self.source, self.target), max(self.source, self.target)

    @property
    def receive(self) -> str:
        """The text of the action that receives it."""
        peer = None if abs(self.source - self.target) == 1 else self.source
        return str(Action(self.target, self.transfer.receive, self.microbatch, None, peer))

    def key(self, microbatches: int, numbers: LinkNumbers | None = None) -> int:
        """Number it uniquely, in a pipeline with this number of microbatches; without ``numbers``, of a chain."""
        number = self.link[0] if numbers is None else numbers[self.link]
        return message_key(number, self.microbatch, microbatches, TRANSFERS.index(self.transfer))


def message_key(link: Numbers, microbatch: Numbers, microbatches: int, direction: int) -> Numbers:
    """Number a message by its link, or many, in arrays; activations (0) and gradients (1) alternate.

    >>> message_key(link=2, microbatch=5, microbatches=8, direction=1)
    43
    """
    return 2 * (link * microbatches + microbatch) + direction


def number_links(links: Iterable[Link]) -> LinkNumbers:
    """Number the links of a pipeline; in a chain, each has the number of its source."""
    return {(link.source, link.target): number for number, link in enumerate(links)}


def sent_by(action: Action) -> Message | None:
    """Find the message that an action sends, if it is a SEND."""
    transfer = _BY_SEND.get(action.computation_type)
    if transfer is None:
        return None
    stage, peer = action.stage_index, action.peer_index
    target = stage + transfer.stage_offset if peer is None else peer
    return Message(transfer, stage, target, action.microbatch_index or 0)


def received_by(action: Action) -> Message | None:
    """Find the message that an action receives, if it is a RECV."""
    transfer = _BY_RECEIVE.get(action.computation_type)
    if transfer is None:
        return None
    stage, peer = action.stage_index, action.peer_index
    source = stage - transfer.stage_offset if peer is None else peer
    return Message(transfer, source, stage, action.microbatch_index or 0)


def used_by(action: Action, links: Sequence[Link] | None = None) -> list[Message]:
    """Find the messages that a compute action uses, if they are sent at all; an overlap uses those of its parts.

    >>> [message.receive for message in used_by(Action.from_str("(2F5;7B3)OVERLAP_F_B"))]
    ['2RECV_F5', '7RECV_B3']

    Args:
        action: the action.
        links: the links of the pipeline; without them, those of a chain.
    """
    return [
        Message(transfer, source, part.stage_index, part.microbatch_index or 0)
        for part in action.parts
        if (transfer := _BY_USER.get(part.computation_type)) is not None
        for source in _sources(part.stage_index, transfer, links)
    ]


def _sources(stage: int, transfer: Transfer, links: Sequence[Link] | None) -> list[int]:
    """Find the stages that a stage gets activations, or gradients, from."""
    if links is None:
        return [stage - transfer.stage_offset]
    if transfer is TRANSFERS[0]:
        return [link.source for link in links if link.target == stage]
    return [link.target for link in links if link.source == stage and link.gradient]
