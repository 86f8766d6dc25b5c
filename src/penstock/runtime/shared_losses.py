"""The losses of a step on every rank, not only where they are computed."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import torch

from penstock.errors import MetadataError
from penstock.execution.value_spec import describe
from penstock.execution.wire_format import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.transport.protocol import Transport

_LENGTH: Final = struct.Struct("<I")


def shared(
    losses: Sequence[torch.Tensor], transport: Transport, source: int, device: torch.device
) -> list[torch.Tensor]:
    """The losses that rank `source` has, each as a tensor without dimensions. All ranks call it.

    >>> from penstock.runtime.transport.threads import thread_transports
    >>> shared([torch.tensor(0.5), torch.tensor([0.25])], thread_transports(1)[0], 0, torch.device("cpu"))
    [tensor(0.5000), tensor(0.2500)]
    """
    mine = transport.rank == source
    given = transport.exchange(_written(losses) if mine else b"")[source]
    return [loss.reshape(()) for loss in losses] if mine else _read(given, device)


def _written(losses: Sequence[torch.Tensor]) -> bytes:
    if not losses:
        return b""
    together = torch.stack([loss.detach().reshape(()) for loss in losses]).cpu()
    description = encode(describe(together))
    return _LENGTH.pack(len(description)) + description + bytes(together.view(torch.uint8).tolist())


def _read(data: bytes, device: torch.device) -> list[torch.Tensor]:
    if not data:
        return []
    end = _LENGTH.size + (_LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0)
    meta = decode(data[_LENGTH.size : end])
    values = data[end:]
    if not meta.is_single or len(values) != meta.tensors[0].empty("meta").nbytes:
        raise MetadataError("the losses of the pipeline came in a way that cannot be read")
    together = torch.frombuffer(bytearray(values), dtype=meta.tensors[0].dtype).to(device)
    return list(together.unbind())
