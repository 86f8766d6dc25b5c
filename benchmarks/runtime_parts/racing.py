"""Contestants in turn, so that a busy machine is busy for all of them."""

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
    """Seconds a step, turn by turn, of one contestant on one rank, by each of the clocks."""

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
    """Let each take some steps, and again, ``repeats`` times, in an order drawn anew each time, the same on all ranks.

    Else the same one would always come after the same other, and find the caches and the heap as that one leaves them.
    What is there when they begin is not the collector's business: only what the steps leave costs time.

    Args:
        contestants: by name, those of this side.
        repeats: how often.
        steps: how many steps a turn has.
        names: those of all sides.
        side: this one, if there are several.
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
