"""Merges adjacent halves of a backward: a full backward is cheaper than its two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD
from penstock.lowering.rows import table_of

if TYPE_CHECKING:
    from penstock.graph.action_table import ActionTable
    from penstock.ir.schedule import Schedule


def merge_backward(schedule: Schedule | ActionTable) -> Schedule:
    """Replace an I directly followed by the W of the same stage and microbatch by a B, ignoring idle steps between.

    O(n).

    >>> from penstock.ir.schedule import Schedule
    >>> merge_backward(Schedule([["0F0", "0F1", "0I0", None, "0W0", "0I1"]])).actions[0]
    (0F0, 0F1, 0B0, 0I1)
    """
    actions = table_of(schedule)
    codes, rank = actions.codes, actions.rank
    inputs = actions.positions_of(BACKWARD_INPUT)
    inputs = inputs[inputs < len(codes) - 1]
    follows = packed.change_kind(codes[inputs], BACKWARD_INPUT, BACKWARD_WEIGHT) == codes[inputs + 1]
    alone = ~packed.is_joined(codes[inputs]) & ~packed.is_joined(codes[np.minimum(inputs + 2, len(codes) - 1)])
    inputs = inputs[follows & alone & (rank[inputs] == rank[inputs + 1])]
    merged, kept = codes.copy(), np.ones(len(codes), bool)
    merged[inputs] = packed.change_kind(codes[inputs], BACKWARD_INPUT, FULL_BACKWARD)
    kept[inputs + 1] = False
    return actions.schedule.with_codes(merged[kept], actions.offsets - (inputs + 1).searchsorted(actions.offsets))
