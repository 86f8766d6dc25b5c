"""Gradients are reduced once per stage, when they are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, REDUCE_GRAD, Action
from penstock.verification.findings import Finding, Problem, action_at, at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.graph.action_table import Leaves, Places


def wrongly_reduced(leaves: Leaves) -> Iterator[Problem]:
    """REDUCE_GRAD too early, twice or not at all; nothing in a schedule without any."""
    reductions = leaves.are(REDUCE_GRAD)
    reductions = reductions[leaves.stages_at(reductions) < leaves.schedule.stages]
    if not len(reductions):
        return
    stage = leaves.stages_at(reductions)
    backwards = leaves.are(FULL_BACKWARD, BACKWARD_WEIGHT)
    if not leaves.all_in_range:
        backwards = backwards[leaves.stages_at(backwards) < leaves.schedule.stages]
    last = np.full(leaves.schedule.stages, -1, np.int64)
    last[leaves.stages_at(backwards)] = backwards  # in order: the last one stays
    count = np.bincount(stage, minlength=leaves.schedule.stages)
    if (count == (last >= 0)).all() and (last[stage] < reductions).all():
        return  # one of every stage that has gradients, behind them
    _, first = np.unique(stage, return_index=True)
    again = np.ones(len(reductions), bool)
    again[first] = False
    yield Problem(
        "reduced_twice",
        reductions[again],
        at(leaves, "reduced_twice", "{} is there a second time", "drop it"),
    )
    yield Problem(
        "reduced_early",
        reductions[~again & (last[stage] < 0)],
        at(leaves, "reduced_early", "{}, but the stage has no backward", "drop it, or add the backward"),
    )
    early = ~again & (last[stage] > reductions)
    yield Problem("reduced_early", reductions[early], _before_the_last(leaves, last))
    without = np.setdiff1d(np.flatnonzero(last >= 0), stage)

    def tell(stage: int) -> Finding:
        action, rank = Action(stage, REDUCE_GRAD), int(leaves.home[stage])
        return Finding(
            "not_reduced",
            rank,
            None,
            action,
            f"{action} is missing, though other stages have theirs",
            f"add it to rank {rank}",
        )

    yield Problem("not_reduced", without, tell)


def _before_the_last(leaves: Leaves, last: Places) -> Callable[[int], Finding]:
    """How to tell of a reduction that stands before the last gradients of its stage."""

    def tell(place: int) -> Finding:
        backward = int(last[leaves.stage[place]])
        words = f"{{}} comes before {action_at(leaves, backward)}, the last gradients of the stage"
        fix = f"move it behind {action_at(leaves, backward)}"
        return at(leaves, "reduced_early", words, fix, backward)(place)

    return tell
