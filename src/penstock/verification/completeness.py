"""Checks that every stage runs every microbatch exactly once, on its own rank, forward and (if any) backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.action_table import NONE
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Action,
    ComputationType,
)
from penstock.verification.findings import Finding, Problem, action_at, describe_at, rank_and_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.graph.action_table import ActionTable


def check_placement(actions: ActionTable) -> Iterator[Problem]:
    """Find actions on the wrong rank, and stages and microbatches that do not exist."""
    schedule = actions.schedule
    if actions.all_placed:
        return
    unknown = actions.stage >= schedule.stages
    away = ~unknown
    away[away] = actions.rank_of_stage[actions.stage[away]] != actions.rank[away]

    def describe(position: int) -> Finding:
        action, (rank, step) = action_at(actions, position), rank_and_step(actions, position)
        home = int(actions.rank_of_stage[actions.stage[position]])
        message = f"{action} is on the wrong rank: stage {action.stage_index} is on rank {home}"
        return Finding("misplaced", rank, step, action, message, f"move it to rank {home}", ((rank, step),))

    def describe_stage(position: int) -> Finding:
        known = _count(schedule.stages, "stage")
        message = f"{{}} refers to stage {actions.stage[position]}, but there {known}"
        return describe_at(actions, "misplaced", message, "drop it")(position)

    def describe_microbatch(position: int) -> Finding:
        known = _count(schedule.microbatches, "microbatch")
        message = f"{{}} refers to microbatch {actions.microbatch[position]}, but there {known}"
        fix = 'drop it, or raise the number of microbatches (microbatches=, or "microbatches" in a .json file)'
        return describe_at(actions, "microbatch", message, fix)(position)

    yield Problem("misplaced", np.flatnonzero(away), describe)
    yield Problem("misplaced", np.flatnonzero(unknown), describe_stage)
    yield Problem("microbatch", np.flatnonzero(actions.microbatch >= schedule.microbatches), describe_microbatch)


def check_duplicates(actions: ActionTable) -> Iterator[Problem]:
    """Find actions that appear twice."""
    again = actions.duplicates
    if not len(again):
        return
    for kind in ComputationType:
        mine = again[actions.is_kind(again, kind)]
        yield Problem("repeated", mine, describe_at(actions, "repeated", "{} appears twice", "drop it"))


def check_completeness(actions: ActionTable) -> Iterator[Problem]:
    """Find missing actions, and backwards that appear both whole and in halves."""
    no_forward, no_whole, no_first, no_second = (
        actions.position_grid(kind) == NONE for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    if not no_forward.any() and (no_first == no_second).all() and (no_whole != no_first).all():
        return  # every forward is there, and every backward is either whole or in two halves
    yield Problem("missing", np.flatnonzero(no_forward), _absent(actions, FORWARD))
    if (no_whole & no_first & no_second).all():
        return  # forward only
    yield Problem("missing", np.flatnonzero(no_whole & no_first & no_second), _absent(actions, FULL_BACKWARD))
    yield Problem("missing", np.flatnonzero(no_whole & ~no_first & no_second), _absent(actions, BACKWARD_WEIGHT))
    yield Problem("missing", np.flatnonzero(no_whole & no_first & ~no_second), _absent(actions, BACKWARD_INPUT))
    halves = np.where(no_first, actions.position_grid(BACKWARD_WEIGHT), actions.position_grid(BACKWARD_INPUT))
    yield Problem(
        "backward_twice",
        halves[~no_whole & ~(no_first & no_second)],
        describe_at(
            actions, "backward_twice", "{} is half of a backward that also appears as a full B", "keep one of the two"
        ),
    )


def _count(number: int, noun: str) -> str:
    """Say how many there are, and how they are numbered, after the word ``there``."""
    if number == 0:
        return f"is no {noun}"
    if number == 1:
        return f"is only {noun} 0"
    return f"are {number} {noun}{'es' if noun.endswith('ch') else 's'} (0 to {number - 1})"


def _absent(actions: ActionTable, kind: ComputationType) -> Callable[[int], Finding]:
    def describe(slot: int) -> Finding:
        stage, microbatch = divmod(slot, actions.schedule.microbatches)
        action, rank = Action(stage, kind, microbatch), int(actions.rank_of_stage[stage])
        return Finding("missing", rank, None, action, f"{action} is missing", f"add it to rank {rank}")

    return describe
