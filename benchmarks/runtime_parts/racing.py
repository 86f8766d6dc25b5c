"""Runs contestants alternately, so that a busy machine affects all of them."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from random import Random
from statistics import median, quantiles
from time import perf_counter, process_time, thread_time
from typing import TYPE_CHECKING

import torch.distributed as dist

from runtime_parts.contestants import clear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from runtime_parts.contestants import Contestant
    from runtime_parts.processes import Side

CLOCKS = {"wall": perf_counter, "thread": thread_time, "process": process_time}


@dataclass
class Turns:
    """Seconds per step, turn by turn, of one contestant on one rank, by each of the clocks."""

    wall: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)


def race(
    contestants: dict[str, Contestant],
    *,
    repeats: int,
    steps: int,
    names: Sequence[str] | None = None,
    side: Side | None = None,
) -> dict[str, Turns]:
    """Let each run some steps, ``repeats`` times, in a new random order each time, the same on all ranks.

    Otherwise one contestant would always follow the same other, and find the caches and the heap as that one left them.
    Objects that exist at the start are frozen, so that the garbage collector only spends time on what steps leave.

    Args:
        contestants: those of this side, by name.
        repeats: the number of turns of each.
        steps: the number of steps per turn.
        names: the names of all sides' contestants.
        side: this side, if there are several.
    """
    names = names or list(contestants)

    def in_turn(name: str, act: Callable[[], None]) -> None:
        if name in contestants:
            act()
            if side is not None:
                side.end_turn()
        elif side is not None:
            side.wait()

    turns = {name: Turns() for name in contestants}
    for name in names:
        in_turn(name, lambda name=name: _warm_up(contestants[name]))  # type: ignore[misc]
    gc.collect()
    gc.freeze()
    drawn = Random(0)
    for _ in range(repeats):
        for name in drawn.sample(list(names), len(names)):
            in_turn(name, lambda name=name: _turn(contestants[name], turns[name], steps))  # type: ignore[misc]
    gc.unfreeze()
    dist.barrier()
    for contestant in contestants.values():
        contestant.close()
    return turns


def _warm_up(contestant: Contestant) -> None:
    contestant.step()
    contestant.step()


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
    """The median and the quartiles of some figures."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread:
        """Compute from figures; one is enough."""
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
