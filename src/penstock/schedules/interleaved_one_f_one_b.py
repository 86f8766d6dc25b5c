"""Interleaved 1F1B: several stages per rank reduce the bubble by that factor.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
"""

from __future__ import annotations

from penstock.ir.actions import FORWARD, FULL_BACKWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.interleaving import Rounds, drop_padding
from penstock.schedules.merging import merge_streams
from penstock.schedules.sizes import checked_sizes


def interleaved_one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run 1F1B with the stages of a rank taking turns, a round of microbatches each.

    >>> print(interleaved_one_f_one_b(ranks=2, microbatches=4).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1 .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    ranks, microbatches, stages_per_rank = checked_sizes(ranks, microbatches, stages_per_rank)
    placement = Placement.loop(ranks, ranks * stages_per_rank)
    rounds = Rounds.of(ranks, microbatches)
    rows = []
    for rank, stages in enumerate(placement.rows):
        forwards = rounds.stream(stages, FORWARD)
        backwards = rounds.stream(stages[::-1], FULL_BACKWARD)
        fill = (stages_per_rank - 1) * rounds.size + 2 * (ranks - 1 - rank)
        rows.append(drop_padding(merge_streams((0, forwards), (fill, backwards)), microbatches))
    return Schedule.from_codes(
        rows, placement=placement, microbatches=microbatches, metadata={"name": "Interleaved1F1B"}
    )
