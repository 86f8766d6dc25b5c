"""Reduces the values of a parameter to a few bytes: exactly where a pipeline begins, cheaply while it runs."""

from __future__ import annotations

import hashlib
import zlib
from typing import Final

import torch

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Into how many parts a tensor is cut, so that sums of integers need little memory, and say roughly where it differs.
_PARTS: Final = 64


def digest(tensor: torch.Tensor) -> str:
    """Hash all values. Tensors on the meta device have none.

    >>> digest(torch.ones(2)) == digest(torch.ones(2)), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    if tensor.device.type == "meta":
        return ""
    values = _bits(tensor).cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(values, digest_size=16).hexdigest()  # type: ignore[arg-type]  # an array is a buffer


def checksum(tensor: torch.Tensor) -> int:
    """Sum the values as integers, in one pass where they are; not proof against a permutation of neighbours.

    >>> checksum(torch.ones(2)) == checksum(torch.ones(2)), checksum(torch.ones(2)) == checksum(torch.zeros(2))
    (True, False)
    """
    sums = [part.sum(dtype=torch.int64) for part in _bits(tensor).chunk(_PARTS)]
    numbers: list[int] = torch.stack(sums).tolist() if sums else []
    return zlib.crc32(repr(numbers).encode())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements as integers, in one dimension."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_INTEGERS[flat.element_size()])
