"""Checks that gradients are reduced once per stage, when they are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, REDUCE_GRAD, Action
from penstock.verification.findings import Finding, Problem, action_at, describe_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.graph.action_table import ActionTable, Positions


def check_reductions(actions: ActionTable) -> Iterator[Problem]:
    """Find REDUCE_GRADs that are too early, duplicate or missing. Finds nothing in a schedule without any."""
    reductions = actions.positions_of(REDUCE_GRAD)
    reductions = reductions[actions.stages_at(reductions) < actions.schedule.stages]
    if not len(reductions):
        return
    stage = actions.stages_at(reductions)
    backwards = actions.positions_of(FULL_BACKWARD, BACKWARD_WEIGHT)
    if not actions.all_in_range:
        backwards = backwards[actions.stages_at(backwards) < actions.schedule.stages]
    last = np.full(actions.schedule.stages, -1, np.int64)
    last[actions.stages_at(backwards)] = backwards  # in order, so the last one stays
    count = np.bincount(stage, minlength=actions.schedule.stages)
    if (count == (last >= 0)).all() and (last[stage] < reductions).all():
        return  # one for every stage that has gradients, after them
    _, first = np.unique(stage, return_index=True)
    again = np.ones(len(reductions), bool)
    again[first] = False
    yield Problem(
        "reduced_twice",
        reductions[again],
        describe_at(actions, "reduced_twice", "{} appears twice", "drop it"),
    )
    yield Problem(
        "reduced_early",
        reductions[~again & (last[stage] < 0)],
        describe_at(actions, "reduced_early", "{}, but the stage has no backward", "drop it, or add the backward"),
    )
    early = ~again & (last[stage] > reductions)
    yield Problem("reduced_early", reductions[early], _before_the_last(actions, last))
    without = np.setdiff1d(np.flatnonzero(last >= 0), stage)

    def describe(stage: int) -> Finding:
        action, rank = Action(stage, REDUCE_GRAD), int(actions.rank_of_stage[stage])
        return Finding(
            "not_reduced",
            rank,
            None,
            action,
            f"{action} is missing, although other stages have one",
            f"add it to rank {rank}",
        )

    yield Problem("not_reduced", without, describe)


def _before_the_last(actions: ActionTable, last: Positions) -> Callable[[int], Finding]:
    """Return a function that describes a reduction before the last gradients of its stage."""

    def describe(position: int) -> Finding:
        backward = int(last[actions.stage[position]])
        words = f"{{}} comes before {action_at(actions, backward)}, which computes the last gradients of the stage"
        fix = f"move it after {action_at(actions, backward)}"
        return describe_at(actions, "reduced_early", words, fix, backward)(position)

    return describe
