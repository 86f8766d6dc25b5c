"""Measures how much memory the autograd graph holds while a step runs."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class HeldMemory:
    """Counts the bytes of the storages that graphs hold for their backward, each once, without those of parameters.

    Attributes:
        now: the bytes held now.
        peak: the most bytes held at a time.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.now = self.peak = 0
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is saved within, and when it is released."""
        with torch.autograd.graph.saved_tensors_hooks(self._hold, _Held.get):
            yield

    def _hold(self, tensor: torch.Tensor) -> _Held:
        held = _Held(tensor.detach())
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._parameters:
            size = storage.nbytes()
            self._holders[place] = self._holders.get(place, 0) + 1
            if self._holders[place] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(held, self._release, place, size)
        return held

    def _release(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if self._holders[place] == 0:
            del self._holders[place]
            self.now -= size


class _Held:
    """A saved tensor; the graph releases it after its backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        return self.tensor
