"""Sends the losses of a step to every rank."""

from __future__ import annotations

import math
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
    losses: Sequence[torch.Tensor], transport: Transport, source: int, device: torch.device
) -> list[torch.Tensor]:
    """Send the losses of rank `source` to all ranks, in their shapes and element types. All ranks call it.

    >>> from penstock.runtime.transport.threads import thread_transports
    >>> broadcast_losses([torch.tensor(0.5), torch.tensor([0.25])], thread_transports(1)[0], 0, torch.device("cpu"))
    [tensor(0.5000), tensor([0.2500])]
    """
    mine = transport.rank == source
    given = transport.exchange(_written(losses) if mine else b"")[source]
    return list(losses) if mine else _read(given, device)


def _written(losses: Sequence[torch.Tensor]) -> bytes:
    if not losses:
        return b""
    together = torch.stack([loss.detach().reshape(()) for loss in losses]).cpu()  # one wait for a device
    return join_parts([encode(describe([together, *losses])), bytes(together.view(torch.uint8).tolist())])


def _read(data: bytes, device: torch.device) -> list[torch.Tensor]:
    if not data:
        return []
    description, values, *_ = *split_parts(data), b"", b""
    described = decode(description).tensors if description else ()
    if not _fit(described, values):
        raise MetadataError("could not decode the losses that the last stage's rank sent")
    together, *each = described
    numbers = torch.frombuffer(bytearray(values), dtype=together.dtype).to(device)
    return [number.to(one.dtype).reshape(one.shape) for number, one in zip(numbers.unbind(), each, strict=True)]


def _fit(described: Sequence[TensorSpec], values: bytes) -> bool:
    """Whether these are the values of the first tensor, one for each of the others."""
    if not described or described[0].shape != (len(described) - 1,):
        return False
    single = all(math.prod(one.shape) == 1 for one in described[1:])
    return single and len(values) == described[0].empty("meta").nbytes
