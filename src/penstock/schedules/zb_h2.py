"""ZB-H2: at equal costs, no bubble between steps, for almost twice the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.merging import merge_streams, stream
from penstock.schedules.sizes import checked_sizes


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Warm up twice as long as ZB-H1: at equal costs, with 2p or more microbatches, none of p ranks waits once started.

    >>> print(zb_h2(ranks=3, microbatches=5).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16
    rank 0 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1 .   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
    rank 2 .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches)
    rows = []
    for rank in range(ranks):
        fill = min(2 * (ranks - 1 - rank), microbatches)
        rows.append(
            merge_streams(
                (0, stream(rank, FORWARD, microbatches)),
                (fill, stream(rank, BACKWARD_INPUT, microbatches)),
                (fill + 2 * rank, stream(rank, BACKWARD_WEIGHT, microbatches)),
            )
        )
    return Schedule.from_codes(
        rows, placement=Placement.loop(ranks, ranks), microbatches=microbatches, metadata={"name": "ZB-H2"}
    )
