"""Ours and the peer, one after the other in one run, so that a busy machine is busy for both."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.seconds)

    def __str__(self) -> str:
        low, _, high = quantiles(self.seconds, n=4)
        return f"{self.median * 1e3:9.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})"


def alternate(*contestants: Callable[[], object], repeats: int) -> list[Timing]:
    """Time the contestants in turn, after one run of each that does not count."""
    for contestant in contestants:
        contestant()
    seconds: list[list[float]] = [[] for _ in contestants]
    for _ in range(repeats):
        for contestant, times in zip(contestants, seconds, strict=True):
            gc.collect()
            begin = perf_counter()
            contestant()
            times.append(perf_counter() - begin)
    return [Timing(tuple(times)) for times in seconds]
