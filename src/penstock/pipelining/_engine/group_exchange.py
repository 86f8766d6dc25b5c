"""Moves what ranks exchange at the end of a step over the user's own group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist

from penstock.execution.channel import Progress
from penstock.execution.framing import read_length

if TYPE_CHECKING:
    from penstock.execution.channel import Pending

#: How many bytes are sent without saying how many there are: more than most descriptions have.
_BLOCK: Final = 1024


class GroupExchange:
    """Moves tensors, and bytes as tensors, between the ranks of a stage's group. Peers are ranks in the group.

    Bytes are a frame, which states its length: a block of a fixed size, and another message if it is longer.
    """

    def __init__(self, stage: Any) -> None:
        self.rank: int = stage.group_rank
        self.progress = Progress()
        self._group = stage.group
        self._device = torch.device(stage.device)
        self._sent: list[Pending] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send of a contiguous tensor, which must not change until it is done."""
        return cast("Pending", dist.isend(tensor, group=self._group, group_dst=peer, tag=tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into a contiguous tensor."""
        return cast("Pending", dist.irecv(tensor, group=self._group, group_src=peer, tag=tag))

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Send a frame to a peer. They arrive in order."""
        for part in filter(None, (data[:_BLOCK].ljust(_BLOCK, b"\0"), data[_BLOCK:])):
            tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8).to(self._device)
            self._sent.append(self.send(tensor, peer, 0))

    def receive_bytes(self, peer: int) -> bytes:
        """Wait for the next frame from a peer."""
        block = self._receive(peer, _BLOCK)
        length = read_length(block)
        return block[:length] + (self._receive(peer, length - _BLOCK) if length > _BLOCK else b"")

    def finish(self) -> None:
        """Wait until all bytes are sent."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def _receive(self, peer: int, count: int) -> bytes:
        # Uninitialized memory could be taken for a frame if nothing came.
        tensor = torch.zeros(count, dtype=torch.uint8, device=self._device)
        self.receive(tensor, peer, 0).wait()
        return bytes(tensor.tolist())
