"""Something to read that is on every machine: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from penstock.errors import RunError

#: As much as a short training can make use of.
BYTES = 4_000_000


class Text:
    """The text, and batches from it: the same on every rank, without a word between them."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text, size = [], 0
        for path in sorted(folder.glob("*.py")):
            text.append(path.read_bytes())
            size += len(text[-1])
            if size >= BYTES:
                break
        if size < 10_000:
            raise RunError(f"the demo reads the source of Python's standard library, which is not in {folder}")
        self._bytes = torch.frombuffer(bytearray(b"\n".join(text)), dtype=torch.uint8)

    def batch(self, step: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pieces from anywhere, and the same one byte on."""
        chance = torch.Generator().manual_seed(step)
        begins = torch.randint(len(self._bytes) - length - 1, (size, 1), generator=chance)
        pieces = self._bytes[begins + torch.arange(length + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]
