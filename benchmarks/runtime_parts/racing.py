"""Contestants in turn, in the same processes, so that a busy machine is busy for all of them."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter, process_time, thread_time
from typing import TYPE_CHECKING

import torch.distributed as dist

from runtime_parts.contestants import clear

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runtime_parts.contestants import Contestant

CLOCKS = {"wall": perf_counter, "thread": thread_time, "process": process_time}


@dataclass
class Turns:
    """Seconds a step, turn by turn, of one contestant on one rank, by each of the clocks."""

    wall: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)


def race(contestants: dict[str, Contestant], *, repeats: int, steps: int) -> dict[str, Turns]:
    """Let each take some steps, and again, ``repeats`` times; who begins changes.

    What is there when they begin is not the collector's business: only what the steps leave costs time.
    """
    for contestant in contestants.values():
        contestant.step()
        contestant.step()
    gc.collect()
    gc.freeze()
    turns = {name: Turns() for name in contestants}
    names = list(contestants)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            _turn(contestants[name], turns[name], steps)
    gc.unfreeze()
    dist.barrier()
    for contestant in contestants.values():
        contestant.close()
    return turns


def _turn(contestant: Contestant, turns: Turns, steps: int) -> None:
    gc.collect()
    dist.barrier()
    spent = dict.fromkeys(CLOCKS, 0.0)
    for _ in range(steps):
        clear(contestant)
        begin = {name: clock() for name, clock in CLOCKS.items()}
        contestant.step()
        for name, clock in CLOCKS.items():
            spent[name] += clock() - begin[name]
    for name, seconds in spent.items():
        getattr(turns, name).append(seconds / steps)


@dataclass(frozen=True)
class Spread:
    """The middle of some figures, and the quarters around it."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread:
        """From all the figures; one is enough."""
        ordered = list(figures)
        if len(ordered) == 1:
            return cls(ordered[0], ordered[0], ordered[0])
        low, _, high = quantiles(ordered, n=4, method="inclusive")
        return cls(median(ordered), low, high)

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Turn by turn."""
    return Spread.of(one / other for one, other in zip(mine, theirs, strict=True))
