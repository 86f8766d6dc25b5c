"""Compares predicted step times with measured ones, on two local processes with a core each.

A run records some steps of a schedule, and times plain steps before and after, with another schedule of the same stages
in between. A prediction simulates the schedule with the costs that were recorded under it (itself), or under another
schedule with the same placement: what planning does. The measurement is the median time of a plain call of ``step``,
from when the last rank begins it to when the last rank has returned. Wall time depends on the load of the machine.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.runtime import Pipeline
from runtime_parts.models import Model, loss_function, transformer
from runtime_parts.processes import on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 2
GOAL = 0.10
#: Schedules with the same placement: two that are compared within each group predict each other.
GROUPS = (("1F1B", "ZB-H1"), ("Interleaved1F1B", "InterleavedZeroBubble"), ("ZBVZeroBubble", "DualPipeV"))
#: The schedules that the goal is about.
JUDGED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "ZB-H1", "DualPipeV")


class Size(NamedTuple):
    """A transformer, and its microbatches."""

    layers: int
    width: int
    microbatches: int
    rows: int
    length: int

    @property
    def model(self) -> Model:
        """The model."""
        return transformer(self.layers, self.width, self.rows, self.length)


SIZES = {256: Size(8, 256, 8, rows=1, length=64), 32: Size(4, 32, 6, rows=1, length=32)}
#: Short steps are noisier.
OFTEN = {256: 1, 32: 5}


class Run(NamedTuple):
    """What one run found about a schedule, on one rank.

    Attributes:
        begins: when each plain step was begun here.
        ends: when it had returned.
        recorded: the recorded makespan.
        costs: the recorded costs.
    """

    begins: list[float]
    ends: list[float]
    recorded: float
    costs: dict[str, Any]


class Trainee:
    """A pipeline of one schedule on one rank."""

    def __init__(self, name: str, size: Size, rank: int) -> None:
        self.schedule = ps.build(name, ranks=RANKS, microbatches=size.microbatches)
        placement = self.schedule.placement
        self.modules = size.model.modules(placement.stages, list(placement.stages_of(rank)))
        self.pipe = Pipeline(self.modules, self.schedule, loss_fn=loss_function)
        self.x, self.y = size.model.batch(size.microbatches)

    def step(self) -> tuple[float, float]:
        """Run a step; returns its begin and its end."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=False)
        dist.barrier()
        begin = time.perf_counter()
        self.pipe.step(self.x, target=self.y, return_outputs=False)
        return begin, time.perf_counter()

    def run(self, steps: int) -> Run:
        """Time plain steps, record as many, and time plain ones again."""
        gc.collect()
        self.step()
        plain = [self.step() for _ in range(steps)]
        with self.pipe.recording() as record:
            for _ in range(steps):
                self.step()
        self.step()
        plain += [self.step() for _ in range(steps)]
        begins, ends = map(list, zip(*plain, strict=True))
        return Run(begins, ends, record.makespan, record.costs().to_dict())


def measure(
    rank: int, tell: Callable[[str], None], size: Size, names: list[str], runs: int, steps: int
) -> list[dict[str, Run]]:
    """Measure all schedules in turn, several times, on one rank."""
    trainees = {name: Trainee(name, size, rank) for name in names}
    found = []
    for number in range(runs):
        tell(f"width {size.width}, run {number + 1} of {runs}")
        found.append({name: trainee.run(steps) for name, trainee in trainees.items()})
    for trainee in trainees.values():
        trainee.pipe.close()
    return found


class Row(NamedTuple):
    """Predictions and measurements of a schedule, run by run, in seconds."""

    width: int
    schedule: str
    recorded_under: str
    predicted: list[float]
    measured: list[float]
    recorded: list[float]

    @property
    def errors(self) -> list[float]:
        """How much longer each prediction is than the measurement, as a share of it."""
        return [one / other - 1 for one, other in zip(self.predicted, self.measured, strict=True)]

    @property
    def is_judged(self) -> bool:
        """Whether the goal is about it."""
        return self.schedule == self.recorded_under and self.schedule in JUDGED

    @property
    def goal(self) -> Goal:
        """The median error, and the largest that it may be."""
        return Goal(f"prediction of {self.schedule} at width {self.width}, error", abs(median(self.errors)), GOAL)

    def __str__(self) -> str:
        errors = " ".join(f"{error:+6.1%}" for error in self.errors)
        figures = " ".join(f"{median(each) * 1e3:8.2f}" for each in (self.predicted, self.measured, self.recorded))
        under = "itself" if self.schedule == self.recorded_under else self.recorded_under
        return f"{self.width:5} {self.schedule:21} {under:21} {figures}  {median(self.errors):+6.1%}  {errors}"


def rows_of(size: Size, names: list[str], ranks: list[list[dict[str, Run]]]) -> list[Row]:
    """Predict every schedule from its own costs, and from those of the other one in its group."""
    rows = []
    for name in names:
        schedule = ps.build(name, ranks=RANKS, microbatches=size.microbatches)
        group = next(group for group in GROUPS if name in group)
        measured = [_measured([rank[run][name] for rank in ranks]) for run in range(len(ranks[0]))]
        for under in (name, *(other for other in group if other != name and other in names)):
            predicted = [ps.simulate(schedule, ps.Costs(**run[under].costs)).makespan for run in ranks[0]]
            rows.append(Row(size.width, name, under, predicted, measured, [run[name].recorded for run in ranks[0]]))
    return rows


def _measured(runs: list[Run]) -> float:
    begins = map(max, zip(*(run.begins for run in runs), strict=True))
    ends = map(max, zip(*(run.ends for run in runs), strict=True))
    return float(median(end - begin for begin, end in zip(begins, ends, strict=True)))


def main() -> None:
    """Print a table and the goals; exit with 1 if the median error of a judged schedule is above its goal."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, choices=SIZES, action="append", help="only this; may be repeated")
    parser.add_argument("--only", choices=[name for group in GROUPS for name in group], action="append")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="recorded per run (five times as many at width 32); twice as many are timed",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    given = parser.parse_args()
    names = given.only or [name for group in GROUPS for name in group]
    rows = []
    for width in given.width or SIZES:
        found = on_ranks(RANKS, measure, SIZES[width], names, given.runs, given.steps * OFTEN[width])
        rows += rows_of(SIZES[width], names, found)
    if given.json:
        print(json.dumps([{**row._asdict(), "errors": row.errors} for row in rows], indent=1))
    else:
        print("milliseconds, medians of the runs; errors: predicted / measured - 1, their median, and every run\n")
        print(
            f"{'width':5} {'schedule':21} {'recorded under':21} {'predict':>8} {'measure':>8} {'recorded':>8}  median"
        )
        print(*rows, sep="\n")
    finish([row.goal for row in rows if row.is_judged], given.goals, quiet=given.json)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
