"""Adds the reduction of gradients over data-parallel replicas as soon as the gradients of a stage are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, REDUCE_GRAD
from penstock.lowering.rows import Additions, cell_ends, insert, last_of_each_stage, table_of

if TYPE_CHECKING:
    from penstock.graph.action_table import ActionTable
    from penstock.ir.schedule import Schedule


def reduce_gradients(schedule: Schedule | ActionTable) -> Schedule:
    """Add a REDUCE_GRAD for each stage right after its last B or W, or after the overlap that contains it.

    >>> from penstock.ir.schedule import Schedule
    >>> reduce_gradients(Schedule([["0F0", "1F0", "1B0", "0I0", "0W0"]])).actions[0]
    (0F0, 1F0, 1B0, 1REDUCE_GRAD, 0I0, 0W0, 0REDUCE_GRAD)
    """
    actions = table_of(schedule)
    return insert(actions, find_reductions(actions))


def find_reductions(actions: ActionTable) -> Additions:
    """Find where the REDUCE_GRAD of each stage belongs."""
    last = last_of_each_stage(actions, actions.positions_of(FULL_BACKWARD, BACKWARD_WEIGHT))
    reductions = packed.pack(actions.stages_at(last), REDUCE_GRAD, None)
    return Additions(cell_ends(actions, last), reductions, actions.rank[last])
