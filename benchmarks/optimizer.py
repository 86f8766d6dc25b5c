"""Times steps whose optimizer waits for the norm of all gradients against steps that are validated afterwards.

Both optimizers train the same pipeline and take turns. The norm is computed, but nothing is clipped. A rank that waits
for it cannot begin the next step, so the schedule with the least idle time has the most to lose.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import nn

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.runtime import Pipeline
from runtime_parts.processes import on_ranks
from runtime_parts.racing import Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEDULES = ("1F1B", "ZB-H1", "ZBVZeroBubble")
WIDTH, LAYERS, BATCH, MICROBATCHES = 512, 2, 64, 8
#: The validated step must not cost more than the one that waits.
LIMIT = 1.02


def measure(_rank: int, _report: Callable[[str], None], name: str, turns: int, steps: int) -> dict[bool, list[float]]:
    """Return the seconds of a step in each turn, by whether it was validated afterwards."""
    ranks = torch.distributed.get_world_size()
    schedule = ps.build(name, ranks=ranks, microbatches=MICROBATCHES)
    rank = torch.distributed.get_rank()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    torch.manual_seed(0)
    stages = {
        stage: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        for stage in schedule.placement.stages_of(rank)
    }
    with Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss) as pipe:
        optimizers = {
            late: ps.Optimizer(pipe, torch.optim.AdamW, lr=1e-5, max_norm=1e6, post_validate=late) for late in seconds
        }
        for turn in range(turns + 1):
            for late, optimizer in optimizers.items():
                torch.distributed.barrier()
                found = run(pipe, optimizer, steps)
                if turn:  # the first one negotiates shapes, and makes the state of the optimizer
                    seconds[late].append(found)
    return seconds


def run(pipe: Pipeline, optimizer: ps.Optimizer, steps: int) -> float:
    """Return the seconds of a step."""
    batch, target = torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    begin = perf_counter()
    for _ in range(steps):
        pipe.step(batch, target=target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.validate()
    return (perf_counter() - begin) / steps


def main() -> None:
    """Print a table; exit with 1 if validating afterwards costs time."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    given = parser.parse_args()
    print(
        f"{given.ranks} ranks, milliseconds of a step: median (quartiles); validated afterwards as a share of waiting\n"
    )
    goals = []
    for name in SCHEDULES:
        found = on_ranks(given.ranks, measure, name, given.turns, given.steps)
        waits, late = (
            [max(times) for times in zip(*(rank[kind] for rank in found), strict=True)] for kind in (False, True)
        )
        share = ratios(late, waits)
        shown = "  ".join(f"{median(times) * 1e3:7.2f} ({_quartiles(times)})" for times in (waits, late))
        print(f"{name:16} {shown}  {share}", flush=True)
        goals.append(Goal(f"{name}, step validated afterwards over one that waits", share.middle, LIMIT))
    finish(goals, given.goals)


def _quartiles(seconds: list[float]) -> str:
    spread = Spread.of(one * 1e3 for one in seconds)
    return f"{spread.low:.2f} to {spread.high:.2f}"


if __name__ == "__main__":
    main()
