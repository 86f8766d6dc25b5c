"""ZB-H1: 1F1B with the backward split. At equal costs, a third of the bubble of 1F1B with the same memory.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.merging import merge_streams, stream
from penstock.schedules.sizes import checked_sizes


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Warm up like 1F1B, and delay weight gradients to fill the cool-down: those of rank r run r ticks late.

    >>> print(zb_h1(ranks=3, microbatches=4).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13
    rank 0 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches)
    rows = []
    for rank in range(ranks):
        fill = min(ranks - 1 - rank, microbatches)
        rows.append(
            merge_streams(
                (0, stream(rank, FORWARD, microbatches)),
                (fill, stream(rank, BACKWARD_INPUT, microbatches)),
                (fill + rank, stream(rank, BACKWARD_WEIGHT, microbatches)),
            )
        )
    return Schedule.from_codes(
        rows, placement=Placement.loop(ranks, ranks), microbatches=microbatches, metadata={"name": "ZB-H1"}
    )
