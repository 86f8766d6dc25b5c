"""Copies what is to be saved to the memory of the host, so that training can go on while it is written."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.checkpoints.data_files import Piece

#: Where a tensor may begin in memory, in bytes.
_ALIGNMENT: Final = 64


class Snapshots:
    """Takes one snapshot at a time, always into the same memory: to get new pages takes as long as to copy.

    The memory is as large as what this rank writes, and kept until the pipeline goes.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy tensors; the copies of the last snapshot are overwritten."""
        by_device: dict[torch.device, list[Piece]] = defaultdict(list)
        for piece in pieces:
            by_device[piece.tensor.device].append(piece)
        copies = {piece.key: piece for device, some in by_device.items() for piece in self._copy(some, device)}
        for device in by_device:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return [copies[piece.key] for piece in pieces]

    def _copy(self, pieces: Sequence[Piece], device: torch.device) -> list[Piece]:
        starts, size = [], 0
        for piece in pieces:
            starts.append(size)
            size += -(-piece.tensor.numel() * piece.tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        memory, is_remote = self._memory.get(str(device)), device.type != "cpu"
        if memory is None or memory.numel() < size:
            memory = self._memory[str(device)] = torch.empty(size, dtype=torch.uint8, pin_memory=is_remote)
        copies = []
        for piece, start in zip(pieces, starts, strict=True):
            tensor = piece.tensor
            place = memory[start:][: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            copies.append(piece._replace(tensor=place.copy_(tensor, non_blocking=is_remote)))
        return copies
