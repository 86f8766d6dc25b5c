"""Compares a planned partition and schedule with the usual ones: a transformer with a heavy head, on local processes.

The layers are profiled on the ranks, ``plan`` chooses the partition and the schedule from their costs, and the result
runs against three schedules of the even split: 1F1B, Interleaved1F1B and ZBVZeroBubble. All four are pipelines in the
same processes and take turns, in a new random order in each round. A step counts from when the last rank begins it to
when the last rank has returned. The prediction of all four is a simulation with the costs that were planned with.

Wall time depends on the load of the machine. If ranks share cores, nothing is judged: that is not modelled.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from itertools import combinations
from random import Random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.planning.layers import Partition, stage_costs
from penstock.runtime import Pipeline
from runtime_parts.models import Block
from runtime_parts.processes import on_ranks
from runtime_parts.racing import Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Callable

PLANNED = "planned"
#: What the even split runs, with the number of stages per rank.
BASELINES = {"1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
#: Losses of the same batch agree up to rounding.
ROUNDING = 1e-4


class Size(NamedTuple):
    """The model and its batch."""

    blocks: int
    width: int
    vocabulary: int
    microbatches: int
    rows: int
    length: int

    def build(self) -> Transformer:
        """Build the model: always the same weights."""
        torch.manual_seed(0)
        return Transformer(self.blocks, self.width, self.vocabulary)

    def batch(self, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets."""
        drawn = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.vocabulary, (microbatches * self.rows, self.length + 1), generator=drawn)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks of width {self.width}, vocabulary {self.vocabulary}, "
            f"{self.microbatches} microbatches of {self.rows} x {self.length}"
        )


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, blocks: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_function(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Contestant(NamedTuple):
    """A partition and a schedule."""

    name: str
    partition: Partition
    schedule: ps.Schedule


class Steps(NamedTuple):
    """When each step of a contestant was begun on one rank, and when it had returned; and the loss there."""

    begins: list[float]
    ends: list[float]
    loss: float | None


def profiled(_rank: int, tell: Callable[[str], None], size: Size, repeats: int) -> ps.Profile:
    """Profile every layer, on all ranks at once."""
    tokens, target = size.batch(1)
    return ps.profile(
        size.build, ((tokens,), {}), target=target, loss_fn=loss_function, per="layer", repeats=repeats, report=tell
    )


class Trainee:
    """A pipeline of one contestant on one rank."""

    def __init__(self, contestant: Contestant, names: list[str], size: Size) -> None:
        example = ((size.batch(1)[0],), {})
        split = ps.split(size.build, layout=contestant.partition.group(names), example=example, check=False)
        self.pipe = Pipeline(split, contestant.schedule, loss_fn=loss_function)
        self.tokens, self.target = size.batch(size.microbatches)
        self.parameters = list(self.pipe.parameters())
        self.steps = Steps([], [], None)

    def step(self) -> tuple[float, float]:
        """Run a step; returns its begin and its end."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        dist.barrier()
        begin = time.perf_counter()
        self.pipe.step(self.tokens, target=self.target, return_outputs=False)
        return begin, time.perf_counter()

    def turn(self) -> None:
        """Time a step."""
        gc.collect()
        begin, end = self.step()
        self.steps.begins.append(begin)
        self.steps.ends.append(end)

    def finish(self) -> Steps:
        """Close the pipeline; returns what was found."""
        loss = self.pipe.loss
        self.pipe.close()
        return self.steps._replace(loss=None if loss is None else loss.item())


def raced(
    _rank: int, tell: Callable[[str], None], size: Size, contestants: list[Contestant], names: list[str], rounds: int
) -> dict[str, Steps]:
    """Let all contestants run a step in turn, in a new random order in each round, the same on all ranks."""
    trainees = [Trainee(contestant, names, size) for contestant in contestants]
    for trainee in (*trainees, *trainees):
        trainee.step()
    gc.collect()
    gc.freeze()
    drawn = Random(0)
    for number in range(rounds):
        if number % 10 == 0:
            tell(f"round {number + 1} of {rounds}")
        for trainee in drawn.sample(trainees, len(trainees)):
            trainee.turn()
    return {contestant.name: trainee.finish() for contestant, trainee in zip(contestants, trainees, strict=True)}


class Row(NamedTuple):
    """What was predicted and measured of a contestant, in seconds."""

    name: str
    sizes: tuple[int, ...]
    predicted: float
    measured: list[float]

    @property
    def median(self) -> float:
        """The middle of what was measured."""
        return median(self.measured)


def disagree(one: Row, other: Row) -> bool:
    """Whether the prediction has them in another order than the medians."""
    return (one.predicted < other.predicted) != (one.median < other.median)


def is_clear(one: Row, other: Row) -> bool:
    """Whether one was faster than the other in three rounds of four."""
    spread = ratios(one.measured, other.measured)
    return spread.high < 1 or spread.low > 1


def seconds_of(ranks: list[Steps]) -> list[float]:
    """Return how long each step took: from the last rank's begin to the last rank's end."""
    begins = map(max, zip(*(steps.begins for steps in ranks), strict=True))
    ends = map(max, zip(*(steps.ends for steps in ranks), strict=True))
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def compare(size: Size, ranks: int, rounds: int, repeats: int) -> list[Row]:
    """Profile, plan and race."""
    profile = on_ranks(ranks, profiled, size, repeats)[0]
    print(profile.describe(), "\n", flush=True)
    names = [name for group in profile.names for name in group]
    plan = ps.plan(profile.costs, ranks=ranks, microbatches=size.microbatches, layers=True)
    print(plan.describe(), "\n", flush=True)
    assert plan.partition is not None
    contestants = [Contestant(PLANNED, plan.partition, plan.schedule)]
    for name, stages in BASELINES.items():
        schedule = ps.build(name, ranks=ranks, microbatches=size.microbatches)
        contestants.append(Contestant(name, Partition.even(len(names), stages * ranks), schedule))
    found = on_ranks(ranks, raced, size, contestants, names, rounds)
    losses = [steps.loss for rank in found for steps in rank.values() if steps.loss is not None]
    if len(losses) != len(contestants) or max(losses) - min(losses) > ROUNDING:
        sys.exit(f"the contestants do not compute the same: their losses are {losses}")
    return [
        Row(
            each.name,
            each.partition.sizes,
            ps.simulate(each.schedule, stage_costs(profile.costs, each.partition)).makespan,
            seconds_of([rank[each.name] for rank in found]),
        )
        for each in contestants
    ]


def show(rows: list[Row], ranks: int) -> list[Goal]:
    """Print a table, and what follows from it; returns the goals."""
    print("milliseconds of a step: predicted, median (quartiles); predicted / measured - 1; planned as a share of it\n")
    planned = rows[0]
    for row in rows:
        spread = Spread.of(one * 1e3 for one in row.measured)
        share = "" if row is planned else ratios(planned.measured, row.measured)
        print(
            f"{row.name:16} {row.predicted * 1e3:8.1f} {spread.middle:8.1f} ({spread.low:.1f} to {spread.high:.1f})"
            f"  {row.predicted / row.median - 1:+6.1%}  {share}  layers {', '.join(map(str, row.sizes))}"
        )
    slower = [row.name for row in rows[1:] if planned.median >= row.median]
    swapped = [pair for pair in combinations(rows, 2) if disagree(*pair)]
    wrong = [f"{one.name} and {other.name}" for one, other in swapped if is_clear(one, other)]
    close = [f"{one.name} and {other.name}" for one, other in swapped if not is_clear(one, other)]
    print(f"\nplanned is faster than each: {'no, not than ' + ', '.join(slower) if slower else 'yes'}")
    print(f"predicted and measured in the same order: {'no: ' + '; '.join(wrong) if wrong else 'yes'}")
    if close:
        print(f"in the other order, but the quartiles of their ratio include 1: {'; '.join(close)}")
    print()
    return [
        *(
            Goal(f"planned step as a share of {row.name}, {ranks} ranks", planned.median / row.median, 1)
            for row in rows[1:]
        ),
        Goal(f"pairs predicted in the wrong order, {ranks} ranks", len(wrong), 0),
    ]


def main() -> None:
    """Print a table for each number of ranks, and goals where ranks have a core each; exit with 1 if one is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, action="append", help="by default 2 and 4; may be repeated")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a microbatch")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=20, help="how often a layer is measured")
    given = parser.parse_args()
    size = Size(given.blocks, 64, 32_000, given.microbatches, rows=1, length=given.length)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    goals: list[Goal] = []
    for ranks in given.ranks or (2, 4):
        shared = f"; {cores} cores are shared, which no prediction knows" if ranks > cores else ", a core each"
        print(f"{ranks} ranks{shared}; {size}\n", flush=True)
        found = show(compare(size, ranks, given.rounds, given.repeats), ranks)
        goals += found if ranks <= cores else []
    finish(goals, given.goals)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
