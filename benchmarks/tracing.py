"""Measures what a trace costs: steps with and without one, in turn, in the same processes.

Stages keep their core busy for a fixed time, 1 ms by default, in the forward and in the backward, so that nothing but
the runtime varies. Two pipelines of the same stages take turns, one with a trace; the first of a pair alternates.
"""

from __future__ import annotations

from math import sqrt
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.runtime import Pipeline
from runtime_parts.processes import on_ranks

#: Schedules, and stages per rank.
SCHEDULES = {"1F1B": 1, "Interleaved1F1B": 2}
LIMIT = 2.0


def spin(seconds: float) -> None:
    """Keep the core busy."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


class Spin(torch.autograd.Function):
    """Takes a fixed time forward, and the same backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return the product."""
        spin(seconds)
        context.save_for_backward(value, weight)
        context.seconds = seconds
        return value * weight

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return its gradients."""
        spin(context.seconds)
        value, weight = context.saved_tensors
        return gradient * weight, (gradient * value).sum(), None


class Stage(nn.Module):
    """A stage that takes a fixed time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value times a weight."""
        return Spin.apply(value, self.weight, self.seconds)


def measure(
    rank: int, _report: object, name: str, microbatches: int, seconds: float, pairs: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without and with a trace, pair by pair."""
    torch.set_num_threads(1)
    schedule = ps.build(name, ranks=dist.get_world_size(), microbatches=microbatches, stages_per_rank=SCHEDULES[name])
    batch = torch.ones(microbatches, 64)
    found: dict[bool, list[float]] = {False: [], True: []}
    pipes = {}
    for trace in found:
        stages = {stage: Stage(seconds) for stage in schedule.placement.stages_of(rank)}
        pipes[trace] = Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss, trace=trace)
    for pair in range(-3, pairs):
        for trace in (False, True) if pair % 2 else (True, False):
            dist.barrier()
            begin = perf_counter()
            pipes[trace].step(*([batch] if pipes[trace].has_first else []), target=batch, return_outputs=False)
            dist.barrier()
            if pair >= 0:  # the first ones negotiate shapes and fill caches
                found[trace].append(perf_counter() - begin)
    for pipe in pipes.values():
        pipe.close()
    return found[False], found[True]


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Return where the median of all possible values is with 95 % confidence, by the ranks of these."""
    ordered, reach = sorted(values), round(0.98 * sqrt(len(values)))
    middle = len(values) // 2
    return ordered[max(0, middle - reach)], ordered[min(len(values) - 1, middle + reach)]


def main() -> None:
    """Print a table; exit with 1 if a trace costs too much."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--stage", type=float, default=1.0, help="milliseconds of a forward, and of a backward")
    parser.add_argument("--pairs", type=int, default=1500, help="of steps, for each schedule")
    given = parser.parse_args()
    print(f"{given.ranks} ranks, {given.microbatches} microbatches, stages of {given.stage:g} ms, {given.pairs} pairs")
    print(
        f"{'schedule':16} {'without':>10} {'with':>10}  cost: median of pairs, 95 % interval of it, quartiles of pairs"
    )
    goals = []
    for name in SCHEDULES:
        arguments = (name, given.microbatches, given.stage / 1e3, given.pairs)
        without, traced = on_ranks(given.ranks, measure, *arguments)[0]
        costs = [100 * (one / other - 1) for one, other in zip(traced, without, strict=True)]
        times = f"{median(without) * 1e3:7.2f} ms {median(traced) * 1e3:7.2f} ms"
        low, _, high = quantiles(costs, n=4)
        least, most = interval_of_median(costs)
        print(f"{name:16} {times}  {median(costs):.2f} %, {least:.2f} to {most:.2f}, {low:.2f} to {high:.2f}")
        goals.append(Goal(f"cost of a trace, {name}, {given.stage:g} ms stages", median(costs), LIMIT, unit="%"))
    finish(goals, given.goals)


if __name__ == "__main__":
    main()
