"""V-Half: half the activation memory of 1F1B, and a smaller bubble.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.
"""

from __future__ import annotations

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.building_blocks import Block, repeat_and_compact
from penstock.schedules.sizes import checked_sizes


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Place stages in a V, and hold half the activations of 1F1B: those of p // 2 + 1 microbatches on p ranks.

    >>> print(v_half(ranks=3, microbatches=3).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21  22
    rank 0 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
    rank 1 .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 .   1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
    rank 2 .   .   2F0 3F0 2F1 3F1 .   .   3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches, 2)
    return Schedule.from_codes(
        repeat_and_compact([v_half_block(rank, ranks) for rank in range(ranks)], microbatches),
        placement=Placement.v(ranks, 2 * ranks),
        microbatches=microbatches,
        metadata={"name": "V-Half"},
    )


def v_half_block(rank: int, ranks: int) -> Block:
    """Return the block of a rank: two ticks per hop down the V, one per hop up."""
    pause = 3 if ranks % 2 == 0 else 0  # otherwise the passes would collide on an even number of ranks
    turn, end = 3 * ranks - 2, 6 * ranks - 2 + pause
    return 2 * rank, turn - rank, turn + 1 + pause + 2 * rank, end - rank
