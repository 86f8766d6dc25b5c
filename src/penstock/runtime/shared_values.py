"""Shares plain data between all ranks of a pipeline, e.g. metrics that only one rank can compute."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import MetadataError, StageError

if TYPE_CHECKING:
    from penstock.runtime.transport.protocol import Transport


def gather(values: Any, transport: Transport) -> list[Any]:
    """Get what every rank passes, in the order of ranks. All of them call it."""
    return [_decode(data, rank) for rank, data in enumerate(transport.exchange(_encode(values)))]


def broadcast(values: Any, source: int, transport: Transport) -> Any:
    """Get what rank `source` passes. All ranks call it.

    >>> from penstock.runtime.transport.threads import thread_transports
    >>> broadcast({"accuracy": torch.tensor(0.75), "seen": [1, 2]}, 0, thread_transports(1)[0])
    {'accuracy': 0.75, 'seen': [1, 2]}
    """
    if not 0 <= source < transport.ranks:
        raise StageError(f"unknown rank {source}; there are {transport.ranks} ranks (0 to {transport.ranks - 1})")
    return _decode(transport.exchange(_encode(values) if transport.rank == source else b"null")[source], source)


def _encode(values: Any) -> bytes:
    return json.dumps(values, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise StageError(
        f"only numbers, text, tensors, and lists and mappings of them can be shared, not {type(value).__name__}"
    )


def _decode(data: bytes, rank: int) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise MetadataError(f"the values that rank {rank} shared could not be decoded: {data[:60]!r}") from None
