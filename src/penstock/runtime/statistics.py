"""Counts how long a rank trains, and how much of that it waits for other ranks."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.execution.channel import Progress


class Statistics(NamedTuple):
    """How a rank has spent its time in training.

    Attributes:
        steps: how many calls of ``pipe.step`` have ended.
        seconds: how long these took, with the steps of ``ps.Optimizer`` and ``clip_grad_norm_``.
        waited: how many of these seconds the rank waited for other ranks.

    >>> before, now = Statistics(10, 20.0, 6.0), Statistics(12, 24.0, 7.0)
    >>> now.since(before).bubble
    0.25
    """

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def bubble(self) -> float:
        """Which part of its time the rank waited, from 0 to 1."""
        return self.waited / self.seconds if self.seconds else 0.0

    def since(self, before: Statistics) -> Statistics:
        """Return what has been counted since."""
        return Statistics(self.steps - before.steps, self.seconds - before.seconds, self.waited - before.waited)


class StepCounter:
    """Counts the steps of a rank.

    Attributes:
        total: the counts so far.
    """

    def __init__(self) -> None:
        self.total = Statistics()

    @contextmanager
    def count(self, progress: Progress, *, steps: int = 0) -> Iterator[None]:
        """Around what belongs to training: `steps` steps, or what comes after one."""
        begin, waited = time.perf_counter(), progress.waited
        try:
            yield
        finally:
            before, seconds = self.total, time.perf_counter() - begin
            self.total = Statistics(
                before.steps + steps, before.seconds + seconds, before.waited + progress.waited - waited
            )
