"""Merge the halves of a backward that stand together: one backward is cheaper than its two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD
from penstock.lowering.rows import rebuilt, taken_apart

if TYPE_CHECKING:
    from penstock.graph.leaves import Leaves
    from penstock.ir.schedule import Schedule


def merge_backward(schedule: Schedule | Leaves) -> Schedule:
    """An I directly followed by the W of the same stage and microbatch becomes a B; idle steps between do not count.

    >>> from penstock.ir.schedule import Schedule
    >>> merge_backward(Schedule([["0F0", "0F1", "0I0", None, "0W0", "0I1"]])).actions[0]
    (0F0, 0F1, 0B0, 0I1)
    """
    leaves = taken_apart(schedule)
    codes, ranks = leaves.codes, leaves.rank
    kinds, joined = packed.types(codes), packed.is_joined(codes)
    alone = ~joined
    alone[:-1] &= ~joined[1:]
    first = np.zeros(len(codes), bool)
    first[:-1] = (
        (kinds[:-1] == packed.TYPE_NUMBER[BACKWARD_INPUT])
        & (kinds[1:] == packed.TYPE_NUMBER[BACKWARD_WEIGHT])
        & (packed.stages(codes)[:-1] == packed.stages(codes)[1:])
        & (packed.microbatches(codes)[:-1] == packed.microbatches(codes)[1:])
        & (ranks[:-1] == ranks[1:])
        & alone[:-1]
        & alone[1:]
    )
    merged = codes.copy()
    merged[first] = packed.retyped(merged[first], BACKWARD_INPUT, FULL_BACKWARD)
    kept = ~np.roll(first, 1)
    return rebuilt(leaves.schedule, merged[kept], ranks[kept])
