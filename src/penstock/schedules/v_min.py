"""V-Min: a third of the activation memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. Its bubble grows with the number of microbatches if
forwards and weight gradients do not cost the same.
"""

from __future__ import annotations

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.building_blocks import PERIOD, Block, repeat_and_compact
from penstock.schedules.sizes import checked_sizes
from penstock.schedules.v_half import v_half_block


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Place stages in a V, and hold a third of the activations of 1F1B: those of (p + 4) // 3 microbatches on p ranks.

    >>> print(v_min(ranks=4, microbatches=2).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
    rank 0 0F0 0F1 .   .   .   .   .   7F0 7I0 7F1 7I1 7W0 7W1 .   .   0I0 0W0 0I1 0W1
    rank 1 .   1F0 1F1 .   .   .   6F0 .   6F1 6I0 6W0 6I1 6W1 .   1I0 1W0 1I1 1W1
    rank 2 .   .   2F0 2F1 .   5F0 .   5F1 .   .   5I0 5W0 5I1 2I0 2W0 2I1 5W1 2W1
    rank 3 .   .   .   3F0 4F0 3F1 4F1 .   .   .   .   4I0 3I0 4I1 3I1 4W0 3W0 4W1 3W1
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches, 2)
    return Schedule.from_codes(
        repeat_and_compact([_block(rank, ranks) for rank in range(ranks)], microbatches),
        placement=Placement.v(ranks, 2 * ranks),
        microbatches=microbatches,
        metadata={"name": "V-Min"},
    )


def _block(rank: int, ranks: int) -> Block:
    """Return the block of a rank: one tick per hop, up and down."""
    if ranks // 2 + 1 == (ranks + 4) // 3:  # V-Half takes no more memory, and tolerates unequal costs better
        return v_half_block(rank, ranks)
    pause = (2 - 2 * ranks) % PERIOD  # makes passes up and down alternate in the same way on any number of ranks
    turn, end = 2 * ranks - 1, 4 * ranks - 1 + pause
    return rank, turn - rank, turn + 1 + pause + rank, end - rank
