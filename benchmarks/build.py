"""Measures building a schedule against the order generation of the installed torch, and how the time grows.

Torch's side is its constructor without the lowering: only the order of every rank. Ours is measured twice: as built,
and with every action of every rank unpacked into an object, as in torch's order.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import penstock as ps
from alternating import alternate
from goals import Goal, finish, parser_of
from penstock.schedules.registry import RECIPES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch_oracle

RANKS, STAGES_PER_RANK, MICROBATCHES = 64, 2, 512
PEERS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
LARGEST_GROWTH = 4.6


def main() -> None:
    """Print both tables and the goals; exit with 1 if one is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    finish([*compare(given.repeats), *growth(given.repeats)], given.goals)


def compare(repeats: int) -> list[Goal]:
    """Measure ours and torch's alternately."""
    print(f"building at ({RANKS} ranks, {STAGES_PER_RANK} stages per rank, {MICROBATCHES} microbatches), "
          f"median of {repeats} (quartiles)\n")  # fmt: skip
    print(f"{'':22} {'torch':>34} {'penstock':>34} {'faster':>7} {'with objects':>34} {'faster':>7}")
    goals = []
    for name in PEERS:
        stages = 1 if name in ("GPipe", "1F1B") else STAGES_PER_RANK
        torch, ours, looked_at = alternate(
            partial(torch_oracle.instance, name, RANKS, MICROBATCHES, stages),
            partial(ps.build, name, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=stages),
            partial(build_and_look, name, stages),
            repeats=repeats,
        )
        ratio, with_objects = torch.median / ours.median, torch.median / looked_at.median
        goals.append(Goal(f"building {name}, times as fast as torch", ratio, 1, at_least=True))
        print(f"{name:22} {torch!s:>34} {ours!s:>34} {ratio:6.1f}x {looked_at!s:>34} {with_objects:6.1f}x")
    return goals


def build_and_look(name: str, stages_per_rank: int) -> object:
    """Build, and unpack every action."""
    schedule = ps.build(name, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=stages_per_rank)
    return list(schedule.actions)


def growth(repeats: int) -> list[Goal]:
    """Measure the time for four times the actions over the time, in both directions."""
    print(f"\ntime(4n) / time(n), median of {repeats}; at most {LARGEST_GROWTH} if linear\n")
    columns = ["4x microbatches", "4x ranks", "2x both", "4x ranks at m=2"]
    print(f"{'':22} {'n':>22} {' '.join(f'{column:>16}' for column in columns)}")
    goals = []
    for recipe in RECIPES:
        sizes = [(16, 512), (16, 2048), (64, 512), (32, 1024), (64, 2), (256, 2)]
        timings = alternate(
            *(partial(ps.build, recipe.name, ranks=ranks, microbatches=m) for ranks, m in sizes), repeats=repeats
        )
        ratios = [timing.median / timings[0].median for timing in timings[1:4]]
        ratios.append(timings[5].median / timings[4].median)  # far fewer microbatches than ranks
        goals.append(Goal(f"building {recipe.name}, time for four times the actions", max(ratios), LARGEST_GROWTH))
        drawn = " ".join(f"{ratio:16.2f}" for ratio in ratios)
        print(f"{recipe.name:22} {timings[0].median * 1e3:19.2f} ms {drawn}")
    return goals


if __name__ == "__main__":
    main()
