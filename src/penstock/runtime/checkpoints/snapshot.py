"""Copies what is to be saved to the memory of the host, so that training can go on while it is written."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.direct_writes import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.checkpoints.data_files import Piece


class Snapshot(NamedTuple):
    """Tensors to write.

    Attributes:
        pieces: the tensors, or copies of them.
        memory: where the copies are, one behind the other, from its beginning on; it ends with a page.
    """

    pieces: list[Piece]
    memory: memoryview | None = None


class Snapshots:
    """Takes one snapshot at a time, always into the same memory: to get new pages takes as long as to copy.

    The memory is as large as what this rank writes, and kept until the pipeline goes.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, pieces: Sequence[Piece]) -> Snapshot:
        """Copy tensors, sorted by the size of their elements; the copies of the last snapshot are overwritten."""
        devices = {piece.tensor.device for piece in pieces if piece.tensor.device.type != "cpu"}
        size = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in pieces)
        if self._memory.numel() < size:
            self._memory = _new_memory(-(-size // PAGE) * PAGE, pinned=bool(devices))
        copies, start = [], 0
        for piece in pieces:
            tensor = piece.tensor
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(f"{piece.name} is a sparse or quantized tensor; make it dense first")
            end = start + tensor.numel() * tensor.element_size()
            place = self._memory[start:end].view(tensor.dtype).view(tensor.shape)
            copies.append(piece._replace(tensor=place.copy_(tensor, non_blocking=True)))
            start = end
        for device in devices:
            torch.accelerator.synchronize(device)
        return Snapshot(copies, self._memory.numpy().data)


def _new_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Get memory that begins with a page; `pinned` for devices to copy into while they compute."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, size)
    with suppress(OSError, AttributeError):  # large pages are faster to get, where there are any
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
