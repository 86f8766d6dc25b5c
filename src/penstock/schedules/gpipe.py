"""GPipe: all forwards, then all backwards. Simple, but holds every activation at once.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018.
"""

from __future__ import annotations

from penstock.ir.actions import FORWARD, FULL_BACKWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.merging import merge_streams, stream
from penstock.schedules.sizes import checked_sizes


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Run every forward, then every backward.

    >>> print(gpipe(ranks=3, microbatches=3).grid())
    step   0   1   2   3   4   5   6   7   8   9
    rank 0 0F0 0F1 0F2 .   .   .   .   0B0 0B1 0B2
    rank 1 .   1F0 1F1 1F2 .   .   1B0 1B1 1B2
    rank 2 .   .   2F0 2F1 2F2 2B0 2B1 2B2
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches)
    rows = [
        merge_streams(
            (0, stream(rank, FORWARD, microbatches)), (microbatches, stream(rank, FULL_BACKWARD, microbatches))
        )
        for rank in range(ranks)
    ]
    return Schedule.from_codes(
        rows, placement=Placement.loop(ranks, ranks), microbatches=microbatches, metadata={"name": "GPipe"}
    )
