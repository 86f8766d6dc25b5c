"""Measures planning: how long it takes, how far plans are from their bounds, and what they gain over known schedules.

All costs are drawn at random with fixed seeds. Times are those of ``ps.plan`` with the effort by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import numpy as np

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.errors import ScheduleError
from penstock.schedules.registry import RECIPES

#: Ranks, microbatches, and the most seconds that planning may take.
SIZES = ((8, 64, 2.0), (32, 128, 20.0), (64, 512, 120.0))
FIRST_CALL = 30.0
MEAN_GAP = 0.003
INSTANCES, QUICK_INSTANCES = 40, 8
#: Problems that must be solved, and the most seconds that each may take.
SMALL, QUICK_SMALL = 20, 4
MOST_SECONDS = {"makespan": 2.0, "span": 10.0}
PARTS = ("first", "times", "gaps", "small", "tight")

_FIRST_CALL = """
from time import perf_counter
import penstock as ps
begin = perf_counter()
ps.plan(ranks=8, microbatches=64, memory_limit=7.5)
print(perf_counter() - begin)
"""


def main() -> None:
    """Print the tables and the goals; exit with 1 if one is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of each time; the median counts")
    parser.add_argument("--quick", action="store_true", help="the smallest size, and few instances")
    parser.add_argument("--part", choices=PARTS, help="one part only")
    parser.add_argument("--size", type=int, choices=range(len(SIZES)), help="one size only, by its number")
    arguments = parser.parse_args()
    parts = PARTS if arguments.part is None else (arguments.part,)
    sizes = SIZES if arguments.size is None else SIZES[arguments.size : arguments.size + 1]
    goals: list[Goal] = []
    if "first" in parts:
        goals += first_call()
    if "times" in parts:
        goals += times(SIZES[:1] if arguments.quick else sizes, arguments.repeats)
    if "gaps" in parts:
        goals += gaps(QUICK_INSTANCES if arguments.quick else INSTANCES)
    if "small" in parts:
        goals += small(QUICK_SMALL if arguments.quick else SMALL)
    if "tight" in parts:
        tight(QUICK_INSTANCES if arguments.quick else INSTANCES)
    finish(goals, arguments.goals)


def first_call() -> list[Goal]:
    """Measure the first plan in a fresh process, without and with compiled kernels."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(Path(folder))}
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL], env=environment, capture_output=True, text=True, check=True
            )
            seconds.append(float(done.stdout))
    print(f"first call, 8 ranks, 64 microbatches: {seconds[0]:.1f} s with compilation, {seconds[1]:.1f} s without")
    return [Goal("the first plan on a machine, with compilation", seconds[0], FIRST_CALL, unit="s")]


def times(sizes: tuple[tuple[int, int, float], ...], repeats: int) -> list[Goal]:
    """Measure planning with the memory of 1F1B."""
    ps.plan(ranks=3, microbatches=9, memory_limit=2, effort=0.1)  # loads the compiler
    print(f"\nplanning over 1 to 4 stages per rank, memory of 1F1B, median of {repeats}\n")
    print(f"{'ranks':>5} {'microbatches':>12} {'seconds':>24} {'goal':>6} {'gap':>7}  schedule")
    goals = []
    for ranks, microbatches, goal in sizes:
        seconds, found = [], []
        for seed in range(repeats):
            costs = unequal_costs(np.random.default_rng(seed), ranks)
            begin = perf_counter()
            found.append(ps.plan(costs, ranks=ranks, microbatches=microbatches, memory_limit=ranks))
            seconds.append(perf_counter() - begin)
        name = f"planning for {ranks} ranks and {microbatches} microbatches"
        goals.append(Goal(name, median(seconds), goal, unit="s"))
        spread = f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        gap = median(plan.gap for plan in found)
        names = ", ".join(sorted({plan.alternatives[0].placement for plan in found}))
        print(f"{ranks:5} {microbatches:12} {spread:>24} {goal:6g} {gap:7.2%}  {names}", flush=True)
    return goals


def gaps(instances: int) -> list[Goal]:
    """Compare plans for one stage per rank with their bounds, and with every generator, plain and fitted."""
    found, gained, ahead = [], [], 0
    for seed in range(instances):
        rng = np.random.default_rng(seed)
        ranks = int(rng.integers(2, 17))
        microbatches = int(rng.integers(2 * ranks, 4 * ranks + 1))
        costs, limit = unequal_costs(rng, ranks), float(rng.uniform(1, 2) * ranks)
        plan = ps.plan(costs, ranks=ranks, microbatches=microbatches, memory_limit=limit, stages_per_rank=1)
        best = best_known(costs, ranks, microbatches, limit)
        found.append(plan.gap)
        gained.append(best / plan.value - 1)
        ahead += plan.value <= best * (1 + 1e-9)
    print(
        f"\n{instances} random instances: 2 to 16 ranks with one stage each, 2 to 4 microbatches per rank, 1 to 2 times"
    )
    print("the memory of 1F1B\n")
    print(f"gap to the bound: mean {mean(found):.3%}, median {median(found):.3%}, largest {max(found):.2%}")
    print(f"proved optimal: {sum(gap <= 1e-9 for gap in found)} of {instances}")
    print(
        f"the best generator that fits takes longer by: mean {mean(gained):.2%}, median {median(gained):.2%}, ", end=""
    )
    print(f"{min(gained):.2%} to {max(gained):.2%}; the plan is as good or better in {ahead} of {instances}")
    return [
        Goal("mean gap with one stage per rank", mean(found), MEAN_GAP),
        Goal("instances in which no generator is better than the plan", ahead, instances, at_least=True),
    ]


def small(instances: int) -> list[Goal]:
    """Solve problems of 2 to 4 ranks with one stage each, and of up to 8 microbatches, at any memory."""
    ps.plan(ranks=2, microbatches=2, stages_per_rank=1, effort=0.01)  # loads the compiler
    print(f"\n{instances} random instances: 2 to 4 ranks with one stage each, 1 to 8 microbatches, half to twice the")
    print("memory of 1F1B\n")
    goals = []
    for objective, most in MOST_SECONDS.items():
        seconds, proved = [], 0
        for seed in range(instances):
            rng = np.random.default_rng(1000 + seed)
            ranks, microbatches = int(rng.integers(2, 5)), int(rng.integers(1, 9))
            costs, limit = unequal_costs(rng, ranks), max(1.0, float(rng.uniform(0.5, 2) * ranks))
            begin = perf_counter()
            plan = ps.plan(costs, ranks=ranks, microbatches=microbatches, memory_limit=limit, stages_per_rank=1,
                           objective=objective)  # fmt: skip
            seconds.append(perf_counter() - begin)
            proved += plan.is_optimal
        print(
            f"{objective:8} {proved} of {instances} proved optimal; {median(seconds):.2f} s, at most {max(seconds):.2f}"
        )
        goals.append(Goal(f"small problems proved optimal by {objective}", proved, instances, at_least=True))
        goals.append(Goal(f"the longest of them by {objective}", max(seconds), most, unit="s"))
    return goals


def tight(instances: int) -> None:
    """Report gaps where memory is tight and F and W differ: part of them is the bound."""
    found = []
    for seed in range(instances):
        rng = np.random.default_rng(2000 + seed)
        ranks = int(rng.integers(2, 17))
        microbatches = int(rng.integers(ranks, 4 * ranks + 1))
        forward, inputs, weights = rng.uniform(0.5, 1.5, 3)
        costs = ps.Costs(forward=forward, backward_input=inputs, backward_weight=weights, latency=0.05)
        limit = max(1.0, float(rng.uniform(0.35, 0.9) * ranks))
        found.append(ps.plan(costs, ranks=ranks, microbatches=microbatches, memory_limit=limit).gap)
    print(
        f"\n{instances} random instances: 2 to 16 ranks, 1 to 4 microbatches per rank, 0.35 to 0.9 times the memory of"
    )
    print("1F1B, F and W 0.5 to 1.5, 1 to 4 stages per rank tried\n")
    print(f"gap to the bound: mean {mean(found):.2%}, median {median(found):.2%}, largest {max(found):.2%}")


def best_known(costs: ps.Costs, ranks: int, microbatches: int, limit: float) -> float:
    """Return the shortest makespan of a generator with one stage per rank that fits, plain or fitted."""
    best = float("inf")
    for recipe in RECIPES:
        sizes = {"ranks": ranks, "microbatches": microbatches}
        if recipe.name == "ForwardOnly" or (recipe.stages_per_rank != 1 and not recipe.any_stages):
            continue
        if recipe.any_stages:
            sizes["stages_per_rank"] = 1
        for fitted in (False, True) if recipe.fits_costs else (False,):
            try:
                schedule = ps.build(recipe.name, **sizes, **({"costs": costs} if fitted else {}))
            except ScheduleError:
                continue  # it needs several stages per rank
            timeline = ps.simulate(schedule, costs)
            if max(timeline.peak_memory) <= limit * (1 + 1e-9):
                best = min(best, timeline.makespan)
    return best


def unequal_costs(rng: np.random.Generator, ranks: int) -> ps.Costs:
    """Return costs of ranks that differ by up to a third, with some latency."""
    forward, inputs, weights = rng.uniform(0.85, 1.15, (3, ranks))
    return ps.Costs(forward=forward, backward_input=inputs, backward_weight=weights, latency=float(rng.uniform(0, 0.1)))


if __name__ == "__main__":
    main()
