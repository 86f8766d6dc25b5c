"""ForwardOnly: for evaluation, without any backward."""

from __future__ import annotations

from penstock.ir.actions import FORWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.interleaving import Rounds, drop_padding
from penstock.schedules.sizes import checked_sizes


def forward_only(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Run the forward of every microbatch in order; with several stages per rank, in rounds.

    >>> print(forward_only(ranks=3, microbatches=4).grid())
    step   0   1   2   3   4   5
    rank 0 0F0 0F1 0F2 0F3
    rank 1 .   1F0 1F1 1F2 1F3
    rank 2 .   .   2F0 2F1 2F2 2F3
    """
    ranks, microbatches, stages_per_rank = checked_sizes(ranks, microbatches, stages_per_rank)
    placement = Placement.loop(ranks, ranks * stages_per_rank)
    rounds = Rounds.of(ranks, microbatches)
    rows = [drop_padding(rounds.stream(stages, FORWARD), microbatches) for stages in placement.rows]
    return Schedule.from_codes(rows, placement=placement, microbatches=microbatches, metadata={"name": "ForwardOnly"})
