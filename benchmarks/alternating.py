"""Times contestants alternately in one run, so that a busy machine affects all of them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


#: The minimum seconds of a turn.
SHORTEST_TURN = 0.05


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


def alternate(
    *contestants: Callable[[], object],
    repeats: int,
    shortest_turn: float = SHORTEST_TURN,
    clock: Callable[[], float] = perf_counter,
) -> list[Timing]:
    """Time the contestants in turn, after one run of each that does not count.

    A short run is repeated within its turn, and the mean counts: the time in steady state. With ``shortest_turn=0``, a
    turn is a single run, with the caches as the other contestant and the garbage collector left them: the time of one
    call in between. ``clock=process_time`` counts only the CPU time of the process.
    """
    runs = []
    for contestant in contestants:
        contestant()
        runs.append(max(1, int(shortest_turn / _seconds(contestant, 1, clock))))
    seconds: list[list[float]] = [[] for _ in contestants]
    for _ in range(repeats):
        for contestant, count, times in zip(contestants, runs, seconds, strict=True):
            gc.collect()
            times.append(_seconds(contestant, count, clock))
    return [Timing(tuple(times)) for times in seconds]


def _seconds(contestant: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(count):
        contestant()
    return (clock() - begin) / count
