"""Measures simulating against the dry run of the installed torch, which has no notion of time, and the kernel's speed.

Torch's side is its ``_simulate_comms_compute``, on the same lowered rows, without UNSHARD, RESHARD and REDUCE_GRAD, as
it does not support them. Ours is ``simulate``: for a new schedule, which it also verifies, and again with other costs.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter

import penstock as ps
from alternating import alternate
from goals import Goal, finish, parser_of
from penstock.graph.start_times import start_times
from penstock.simulation.step_graph import build_step_graph

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from torch.distributed.pipelining import schedules as upstream

import torch_oracle

SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
SIZES = ((32, 2, 256), (64, 2, 512))
FASTER, FASTER_AGAIN = 8.0, 50.0
KERNEL_RATE = 5e6
LARGEST_GROWTH = 4.6
FIRST_CALL = 1.0
MANY = 1000

_FIRST_CALL = """
from time import perf_counter
import penstock as ps
lowered = ps.read({path!r})
begin = perf_counter()
ps.simulate(lowered).makespan
print(perf_counter() - begin)
"""


def main() -> None:
    """Print the tables; exit with 1 if a goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="only the smaller size")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    sizes = SIZES[:1] if arguments.quick else SIZES
    from_schedule(ps.lower(ps.build("ZBVZeroBubble", ranks=64, microbatches=512)))  # loads the compiler
    goals = [
        *compare(sizes, arguments.repeats),
        kernel(arguments.repeats),
        *growth(arguments.repeats),
        first_call(arguments.repeats),
        many(arguments.repeats),
    ]
    finish(goals, arguments.goals)


def compare(sizes: tuple[tuple[int, int, int], ...], repeats: int) -> list[Goal]:
    """Measure ours and torch's alternately."""
    print(f"simulating, median of {repeats} (quartiles)\n")
    print(f"{'ranks, stages, microbatches':28} {'':22} {'torch':>36} {'penstock':>32} {'':>8} {'again':>28}")
    goals = []
    for size in sizes:
        for name in SCHEDULES:
            ranks, stages, microbatches = size
            schedule = ps.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
            lowered = ps.lower(schedule, unshard=False, reduce=False)
            torch, first, again = alternate(
                partial(dry_run, torch_oracle.upstream_rows(lowered), lowered),
                partial(from_schedule, lowered),
                partial(other_costs, lowered, count(1)),
                repeats=repeats,
            )
            ratios = torch.median / first.median, torch.median / again.median
            what = f"simulating {name} at {size}, times as fast as torch's dry run"
            goals.append(Goal(what, ratios[0], FASTER, at_least=True))
            goals.append(Goal(f"{what}, with new costs", ratios[1], FASTER_AGAIN, at_least=True))
            timed = f"{torch!s:>36} {first!s:>32} {ratios[0]:7.1f}x {again!s:>28} {ratios[1]:7.1f}x"
            print(f"{size!s:28} {name:22} {timed}", flush=True)
    return goals


def dry_run(rows: dict[int, list[object]], lowered: ps.Schedule) -> object:
    """Torch's."""
    rank_of = lowered.placement.rank_of
    return upstream._simulate_comms_compute(rows, lambda stage: rank_of[stage], lowered.stages)


def from_schedule(lowered: ps.Schedule) -> float:
    """Simulate a schedule that is not cached."""
    build_step_graph.cache_clear()
    return ps.simulate(lowered).makespan


def other_costs(lowered: ps.Schedule, numbers: count[int]) -> float:
    """Simulate the same schedule with new costs."""
    return ps.simulate(lowered, ps.Costs(forward=next(numbers))).makespan


def kernel(repeats: int) -> Goal:
    """Measure how many actions the walk processes per second."""
    lowered = ps.lower(ps.build("ZBVZeroBubble", ranks=64, microbatches=512))
    timeline = ps.simulate(lowered)
    graph, costs = timeline.step_graph, timeline.costs
    (timing,) = alternate(
        partial(
            start_times,
            graph.order,
            graph.durations(costs),
            graph.delays(costs),
            graph.release_times(costs),
        ),
        repeats=repeats,
    )
    rate = len(lowered.codes) / timing.median
    print(f"\nthe kernel: {len(lowered.codes):,} actions in {timing}: {rate / 1e6:.0f} million per second")
    return Goal("the kernel, per second", rate / 1e6, KERNEL_RATE / 1e6, at_least=True, unit="million actions")


def growth(repeats: int) -> list[Goal]:
    """Measure the time for four times the actions over the time."""
    print(f"\ntime(4n) / time(n) from a schedule, median of {repeats}; at most {LARGEST_GROWTH} if linear\n")
    goals = []
    for name in SCHEDULES:
        lowered = [
            ps.lower(ps.build(name, ranks=ranks, microbatches=microbatches))
            for ranks, microbatches in ((16, 128), (32, 256), (64, 512))
        ]
        timings = alternate(*(partial(from_schedule, schedule) for schedule in lowered), repeats=repeats)
        ratios = [later.median / earlier.median for earlier, later in pairwise(timings)]
        goals.append(Goal(f"simulating {name}, time for four times the actions", max(ratios), LARGEST_GROWTH))
        print(f"{name:22} {' '.join(f'{ratio:8.2f}' for ratio in ratios)}", flush=True)
    return goals


def first_call(repeats: int) -> Goal:
    """Measure the first simulation in a fresh process, which loads the compiler with a warm cache."""
    path = Path(__file__).parent / ".first_call.json"
    ps.lower(ps.build("ZBVZeroBubble", ranks=32, microbatches=256)).write(path)
    try:
        command = [sys.executable, "-c", _FIRST_CALL.format(path=str(path))]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
    finally:
        path.unlink()
    seconds = sorted(map(float, runs))
    print(f"\nfirst call in a process: {seconds[len(seconds) // 2]:.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f})")
    return Goal("first simulation of a process", seconds[len(seconds) // 2], FIRST_CALL, unit="s")


def many(repeats: int) -> Goal:
    """Measure a thousand samples of 8 ranks and 64 microbatches."""
    lowered = ps.lower(ps.build("Interleaved1F1B", ranks=8, microbatches=64))
    seconds = []
    for seed in range(min(repeats, 5)):
        begin = perf_counter()
        ps.simulate_many(lowered, noise=0.1, samples=MANY, seed=seed)
        seconds.append(perf_counter() - begin)
    print(f"{MANY} samples of {len(lowered.codes):,} actions: {sorted(seconds)[len(seconds) // 2]:.2f} s")
    return Goal(f"{MANY} samples with noise", sorted(seconds)[len(seconds) // 2], 1.5, unit="s")


if __name__ == "__main__":
    main()
