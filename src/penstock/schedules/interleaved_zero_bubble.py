"""Interleaved zero bubble: Interleaved 1F1B with the backward split; weight gradients fill the bubbles.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023: ZB1P, with several stages per rank.
"""

from __future__ import annotations

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.interleaving import Rounds, drop_padding
from penstock.schedules.merging import merge_streams
from penstock.schedules.sizes import checked_sizes


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run Interleaved 1F1B with a shorter warm-up, and delay weight gradients: those of rank r run r ticks late.

    >>> print(interleaved_zero_bubble(ranks=2, microbatches=4).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
    rank 0 0F0 0F1 2F0 2F1 .   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1 .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
    """
    ranks, microbatches, stages_per_rank = checked_sizes(ranks, microbatches, stages_per_rank)
    placement = Placement.loop(ranks, ranks * stages_per_rank)
    rounds = Rounds.of(ranks, microbatches)
    rows = []
    for rank, stages in enumerate(placement.rows):
        forwards = rounds.stream(stages, FORWARD)
        inputs = rounds.stream(stages[::-1], BACKWARD_INPUT)
        weights = rounds.stream(stages[::-1], BACKWARD_WEIGHT)
        fill = min((stages_per_rank - 1) * rounds.size + (ranks - 1 - rank), len(forwards))
        rows.append(drop_padding(merge_streams((0, forwards), (fill, inputs), (fill + rank, weights)), microbatches))
    return Schedule.from_codes(
        rows, placement=placement, microbatches=microbatches, metadata={"name": "InterleavedZeroBubble"}
    )
