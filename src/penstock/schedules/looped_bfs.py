"""Looped BFS: several stages per rank, each runs all microbatches before the next; suits FSDP.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
"""

from __future__ import annotations

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import FORWARD, FULL_BACKWARD
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.interleaving import Rounds
from penstock.schedules.sizes import checked_sizes


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run all forwards, stage by stage, then all backwards in reverse order.

    >>> print(looped_bfs(ranks=2, microbatches=2).grid())
    step   0   1   2   3   4   5   6   7   8   9
    rank 0 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
    rank 1 .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    ranks, microbatches, stages_per_rank = checked_sizes(ranks, microbatches, stages_per_rank)
    placement = Placement.loop(ranks, ranks * stages_per_rank)
    one_round = Rounds(1, microbatches)
    rows = []
    for stages in placement.rows:
        forwards = one_round.stream(stages, FORWARD)
        rows.append(np.concatenate([forwards, packed.change_kind(forwards[::-1], FORWARD, FULL_BACKWARD)]))
    return Schedule.from_codes(rows, placement=placement, microbatches=microbatches, metadata={"name": "LoopedBFS"})
