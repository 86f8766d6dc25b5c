"""Counts the bytes that a rank sends, by the stages that they go from and to."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from penstock.ir.schedule import Schedule


class SentBytes:
    """Counts bytes, step by step. The tag of a message says which link it goes over, and in which direction.

    Attributes:
        steps: for each step, the bytes by sending and receiving stage.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.steps: list[Counter[tuple[int, int]]] = []
        self._is_open = False
        self._links = schedule.links
        self._messages = 2 * schedule.microbatches

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the actions of a step: what is sent outside of them does not count."""
        self.steps.append(Counter())
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def note(self, tensor: torch.Tensor, tag: int) -> None:
        """Count a tensor that is sent."""
        if self._is_open:
            source, target, *_ = self._links[tag // self._messages]
            self.steps[-1][(target, source) if tag % 2 else (source, target)] += tensor.nbytes
