"""Reduce the gradients of a stage over its data-parallel replicas as soon as they are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, REDUCE_GRAD
from penstock.lowering.rows import cell_ends, last_of_each_stage, ranks_of, rebuilt, without_idle

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule


def reduce_gradients(schedule: Schedule) -> Schedule:
    """A REDUCE_GRAD of each stage right after its last B or W; after the whole overlap if that is in one.

    >>> from penstock.ir.schedule import Schedule
    >>> reduce_gradients(Schedule([["0F0", "1F0", "1B0", "0I0", "0W0"]])).actions[0]
    (0F0, 1F0, 1B0, 1REDUCE_GRAD, 0I0, 0W0, 0REDUCE_GRAD)
    """
    schedule = without_idle(schedule)
    codes, ranks = schedule.codes, ranks_of(schedule)
    kinds, stages = packed.types(codes), packed.stages(codes)
    backward = np.flatnonzero(
        (kinds == packed.TYPE_NUMBER[FULL_BACKWARD]) | (kinds == packed.TYPE_NUMBER[BACKWARD_WEIGHT])
    )
    last = last_of_each_stage(stages, backward)
    ends = cell_ends(codes, last)
    reductions = packed.pack(stages[last], REDUCE_GRAD, None)
    return rebuilt(schedule, np.insert(codes, ends, reductions), np.insert(ranks, ends, ranks[last]))
