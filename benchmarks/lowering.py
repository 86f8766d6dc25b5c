"""Measures building, lowering and verifying against the installed torch, how the time grows, and a million actions.

Torch's side is its constructor: it generates the order, validates and lowers it. Ours is ``build`` and ``lower``, which
verifies its result: complete, ordered, and free of deadlock under rendezvous with a lane per pair.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tracemalloc
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import penstock as ps
from alternating import SHORTEST_TURN, Timing, alternate
from goals import Goal, finish, parser_of
from penstock.graph.comm_model import MODELS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch_oracle

SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SIZES = ((3, 2, 18), (4, 2, 16), (8, 2, 64), (16, 2, 128), (32, 2, 256), (64, 2, 512), (16, 8, 256))
GOAL = {(4, 2, 16): 1.0, (64, 2, 512): 40.0}
#: The growth of each is measured separately.
OPTIONS = {"as it is": {}, "merge_backward": {"merge_backward": True}, "defer_receives": {"defer_receives": True}}
#: Sizes that take milliseconds: a single call, or the first one of a process, differs from the steady state.
SMALL = ((3, 2, 18), (4, 2, 16))
#: Single runs vary more than means of many.
SINGLE_CALLS = 51
LARGEST_GROWTH = 4.6
MOST_BYTES = 300
#: Prints the seconds of one call, in a process that has done nothing but import both packages.
_FIRST_CALL = """
import logging, sys
from functools import partial
from time import perf_counter
from lowering import ours, ps, torch_oracle
logging.disable(logging.WARNING)
ps.build, ps.lower  # loads their modules
side, name, *size = sys.argv[1:]
ranks, stages, microbatches = map(int, size)
call = {
    "torch": partial(torch_oracle.instance, name, ranks, microbatches, stages, lowered=True),
    "penstock": partial(ours, name, ranks, stages, microbatches),
}[side]
begin = perf_counter()
call()
print(perf_counter() - begin)
"""


def main() -> None:
    """Print the tables; exit with 1 if a goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="leave out the sizes where torch takes half a minute")
    parser.add_argument(
        "--only", action="append", choices=("compare", "first_call", "growth", "million"), help="may be repeated"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    ours("ZBVZeroBubble", 64, 2, 512)  # the compiler is loaded, its cache warm
    sizes = [size for size in SIZES if not arguments.quick or size[0] * size[2] < 8000]
    parts = {
        "compare": partial(compare, sizes, arguments.repeats),
        "first_call": partial(first_call, arguments.repeats),
        "growth": partial(growth, arguments.repeats),
        "million": million,
    }
    chosen = [part for name, part in parts.items() if name in (arguments.only or parts)]
    finish([goal for part in chosen for goal in part()], arguments.goals)


def ours(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> ps.Schedule:
    """Build, lower, and (in lower) verify."""
    return ps.lower(built(name, ranks, stages_per_rank, microbatches))


def built(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> ps.Schedule:
    """Build alone."""
    return ps.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


def compare(sizes: list[tuple[int, int, int]], repeats: int) -> list[Goal]:
    """Measure ours and torch's alternately, small ones also in single calls."""
    print(f"build + lower + verify, median of {repeats} (quartiles)\n")
    print(f"{'ranks, stages, microbatches':28} {'':22} {'':10} {'torch':>36} {'penstock':>34} {'faster':>8}")
    goals = []
    for size in sizes:
        ranks, stages, microbatches = size
        for name in SCHEDULES:
            if stages != 2 and name in ("ZBVZeroBubble", "DualPipeV"):
                continue
            for measure, turn in [("one call", 0.0)] * (size in SMALL) + [("steady", SHORTEST_TURN)]:
                torch, mine = alternate(
                    partial(torch_oracle.instance, name, ranks, microbatches, stages, lowered=True),
                    partial(ours, name, ranks, stages, microbatches),
                    repeats=repeats if turn else SINGLE_CALLS,
                    shortest_turn=turn,
                )
                ratio = torch.median / mine.median
                what = f"{measure}, {name} at {size}, times as fast as torch"
                goals.append(Goal(what, ratio, GOAL.get(size, 1.0), at_least=True))
                print(f"{size!s:28} {name:22} {measure:10} {torch!s:>36} {mine!s:>34} {ratio:7.2f}x", flush=True)
    return goals


def first_call(repeats: int) -> list[Goal]:
    """Measure the first call in a fresh process, ours and torch's alternately."""
    print(f"\nfirst build + lower + verify of a process, median of {repeats} (quartiles)\n")
    print(f"{'ranks, stages, microbatches':28} {'':22} {'torch':>36} {'penstock':>34} {'faster':>8}")
    goals = []
    for size in SMALL:
        for name in SCHEDULES:
            seconds: dict[str, list[float]] = {"torch": [], "penstock": []}
            for _ in range(repeats):
                for side, times in seconds.items():
                    command = [sys.executable, "-c", _FIRST_CALL, side, name, *map(str, size)]
                    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
                    times.append(float(run.stdout))
            torch, mine = (Timing(tuple(times)) for times in seconds.values())
            what = f"first call, {name} at {size}, times as fast as torch"
            goals.append(Goal(what, torch.median / mine.median, 1, at_least=True))
            print(f"{size!s:28} {name:22} {torch!s:>36} {mine!s:>34} {torch.median / mine.median:7.2f}x", flush=True)
    return goals


def growth(repeats: int) -> list[Goal]:
    """Measure the time for four times the actions over the time, from (16, 2, 128)."""
    print(f"\ntime(4n) / time(n) of the processor, median of {repeats}; at most {LARGEST_GROWTH} if linear\n")
    sizes = [(16, 2, 128), (32, 2, 256), (64, 2, 512)]
    print(f"{'':22} {'':21} {' '.join(f'{size!s:>14}' for size in sizes)}    {'growth':>17}")
    goals = []
    for name in SCHEDULES:
        schedules = [built(name, *size) for size in sizes]
        measured = {"build and lower": [partial(ours, name, *size) for size in sizes]} | {
            f"lower, {option}": [partial(ps.lower, schedule, **given) for schedule in schedules]
            for option, given in OPTIONS.items()
        }
        for what, contestants in measured.items():
            timings = alternate(*contestants, repeats=repeats, clock=process_time)
            ratios = [later.median / earlier.median for earlier, later in pairwise(timings)]
            goals.append(Goal(f"{what}, {name}, time for four times the actions", max(ratios), LARGEST_GROWTH))
            times = " ".join(f"{timing.median * 1e3:11.1f} ms" for timing in timings)
            print(f"{name:22} {what:21} {times}    {' '.join(f'{ratio:8.2f}' for ratio in ratios)}", flush=True)
    return goals


def million() -> list[Goal]:
    """Measure how fast, and in how much memory, a lowered schedule of a million actions is verified."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    lowered = ps.lower(ps.build("ZBVZeroBubble", ranks=64, microbatches=1120), merge_backward=False)
    bytes_held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    actions = len(lowered.codes)
    print(f"\na lowered schedule of {actions:,} actions: {bytes_held / actions:.1f} bytes per action\n")
    for model in MODELS:
        seconds = [timed(partial(ps.check, lowered, model=model)) for _ in range(3)]
        print(
            f"verified in {median(seconds):.2f} s, {actions / median(seconds) / 1e6:.1f} million/s ({model})",
            flush=True,
        )
    return [Goal("a lowered schedule of a million actions, per action", bytes_held / actions, MOST_BYTES, unit="bytes")]


def timed(work: partial[object]) -> float:
    """Seconds."""
    begin = perf_counter()
    work()
    return perf_counter() - begin


if __name__ == "__main__":
    main()
