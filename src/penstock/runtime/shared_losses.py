"""Sends the losses of a step to every rank."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from penstock.errors import MetadataError
from penstock.execution.framing import join_parts, split_parts
from penstock.execution.value_spec import describe
from penstock.execution.wire_format import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.execution.value_spec import TensorSpec
    from penstock.runtime.transport.protocol import Transport


def broadcast_losses(
    losses: Sequence[torch.Tensor], shares: Sequence[float], transport: Transport, source: int, device: torch.device
) -> tuple[list[torch.Tensor], Sequence[float]]:
    """Send the losses of rank `source`, and how much they count, to all ranks. All ranks call it.

    Losses keep their shapes and element types.

    >>> from penstock.runtime.transport.threads import thread_transports
    >>> transport, device = thread_transports(1)[0], torch.device("cpu")
    >>> broadcast_losses([torch.tensor(0.5), torch.tensor([0.25])], [0.75, 0.25], transport, 0, device)
    ([tensor(0.5000), tensor([0.2500])], [0.75, 0.25])
    """
    mine = transport.rank == source
    given = transport.exchange(_encode(losses, shares) if mine else b"")[source]
    return (list(losses), shares) if mine else _decode(given, device)


def _encode(losses: Sequence[torch.Tensor], shares: Sequence[float]) -> bytes:
    if not losses:
        return b""
    together = torch.stack([loss.detach().reshape(()) for loss in losses]).cpu()  # one wait for a device
    weights = struct.pack(f"<{len(shares)}d", *shares)
    return join_parts([encode(describe([together, *losses])), bytes(together.view(torch.uint8).tolist()), weights])


def _decode(data: bytes, device: torch.device) -> tuple[list[torch.Tensor], list[float]]:
    if not data:
        return [], []
    description, values, weights, *_ = *split_parts(data), b"", b"", b""
    described = decode(description).tensors if description else ()
    if not _fit(described, values) or len(weights) not in (0, 8 * (len(described) - 1)):
        raise MetadataError("could not decode the losses that the last stage's rank sent")
    together, *each = described
    numbers = torch.frombuffer(bytearray(values), dtype=together.dtype).to(device)
    losses = [number.to(one.dtype).reshape(one.shape) for number, one in zip(numbers.unbind(), each, strict=True)]
    return losses, list(struct.unpack(f"<{len(weights) // 8}d", weights))


def _fit(described: Sequence[TensorSpec], values: bytes) -> bool:
    """Whether these are the values of the first tensor, one for each of the others."""
    if not described or described[0].shape != (len(described) - 1,):
        return False
    single = all(math.prod(one.shape) == 1 for one in described[1:])
    return single and len(values) == described[0].empty("meta").nbytes
