"""1F1B: as fast as GPipe, but a rank holds no more activations than there are ranks.

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018; here with a flush, as in Narayanan
et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2020.
"""

from __future__ import annotations

from penstock.ir.actions import FORWARD, FULL_BACKWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.merging import merge_streams, stream
from penstock.schedules.sizes import checked_sizes


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Fill the pipeline, alternate one forward with one backward, drain.

    >>> print(one_f_one_b(ranks=3, microbatches=4).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3
    rank 1 .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3
    rank 2 .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches)
    rows = []
    for rank in range(ranks):
        fill = ranks - 1 - rank
        rows.append(
            merge_streams((0, stream(rank, FORWARD, microbatches)), (fill, stream(rank, FULL_BACKWARD, microbatches)))
        )
    return Schedule.from_codes(
        rows, placement=Placement.loop(ranks, ranks), microbatches=microbatches, metadata={"name": "1F1B"}
    )
