"""A text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from penstock.errors import RunError

#: As much as a short training can use.
BYTES = 4_000_000


class Text:
    """Draws batches from the text: the same on every rank, without communication."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text, size = [], 0
        for path in sorted(folder.glob("*.py")):
            text.append(path.read_bytes())
            size += len(text[-1])
            if size >= BYTES:
                break
        if size < 10_000:
            raise RunError(
                f"the demo trains on the source of Python's standard library, which was not found in {folder}"
            )
        self._bytes = torch.frombuffer(bytearray(b"\n".join(text)), dtype=torch.uint8)

    def batch(self, step: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random pieces of the text, and the same pieces shifted by one byte."""
        generator = torch.Generator().manual_seed(step)
        begins = torch.randint(len(self._bytes) - length - 1, (size, 1), generator=generator)
        pieces = self._bytes[begins + torch.arange(length + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]
