"""V-Min: a third of the activation memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. Its bubble grows with the number of microbatches where
forwards and weight gradients do not cost the same.
"""

from __future__ import annotations

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.building_blocks import Block, repeat_and_compact
from penstock.schedules.sizes import checked_sizes


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A V that holds a third of the activations of 1F1B: (p + 4) // 3 microbatches of them on p ranks.

    >>> print(v_min(ranks=3, microbatches=3).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21  22
    rank 0 0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   5F2 5I2 0I1 0W1 5W2 .   0I2 0W2
    rank 1 .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 1F2 1I0 1W0 4I1 4W1 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2
    rank 2 .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches, 2)
    return Schedule.from_codes(
        repeat_and_compact([_block(rank, ranks) for rank in range(ranks)], microbatches),
        placement=Placement.v(ranks, 2 * ranks),
        microbatches=microbatches,
        metadata={"name": "V-Min"},
    )


def _block(rank: int, ranks: int) -> Block:
    """One tick a hop, up and down."""
    pause = 2 if ranks % 3 == 0 else 0  # without it the passes of 3, 6, 9, ... ranks would collide
    turn, end = 2 * ranks - 1, 4 * ranks - 1 + pause
    return rank, turn - rank, turn + 1 + pause + rank, end - rank
