"""Every stage runs every microbatch exactly once, on its own rank, forward and (if there is any) backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.action_table import NOWHERE
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Action,
    ComputationType,
)
from penstock.verification.findings import Finding, Problem, action_at, at, position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.graph.action_table import Leaves


def misplaced(leaves: Leaves) -> Iterator[Problem]:
    """Actions on a rank that does not hold their stage, and microbatches that there are not."""
    schedule = leaves.schedule
    if leaves.all_at_home:
        return
    unknown = leaves.stage >= schedule.stages
    away = ~unknown
    away[away] = leaves.home[leaves.stage[away]] != leaves.rank[away]

    def tell(place: int) -> Finding:
        action, (rank, step) = action_at(leaves, place), position(leaves, place)
        home = int(leaves.home[leaves.stage[place]])
        return Finding(
            "misplaced", rank, step, action, f"{action} is here, but stage {action.stage_index} is on rank {home}",
            f"move it to rank {home}", ((rank, step),),
        )  # fmt: skip

    yield Problem("misplaced", np.flatnonzero(away), tell)
    yield Problem(
        "misplaced",
        np.flatnonzero(unknown),
        at(leaves, "misplaced", f"{{}} is of a stage that there is not; there are {schedule.stages}", "drop it"),
    )
    yield Problem(
        "microbatch",
        np.flatnonzero(leaves.microbatch >= schedule.microbatches),
        at(
            leaves,
            "microbatch",
            f"{{}} is of a microbatch that there is not; there are {schedule.microbatches}",
            "drop it, or say that there are more: microbatches=, or in a .json file",
        ),
    )


def repeated(leaves: Leaves) -> Iterator[Problem]:
    """The same action twice."""
    again = leaves.repetitions
    if not len(again):
        return
    for kind in ComputationType:
        mine = again[leaves.is_kind(again, kind)]
        yield Problem("repeated", mine, at(leaves, "repeated", "{} is there a second time", "drop it"))


def missing(leaves: Leaves) -> Iterator[Problem]:
    """What a stage does not do for a microbatch, and a backward that is there both whole and in halves."""
    no_forward, no_whole, no_first, no_second = (
        leaves.places(kind) == NOWHERE for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    if not no_forward.any() and (no_first == no_second).all() and (no_whole != no_first).all():
        return  # everything forward, and everything backward either whole or in its two halves
    yield Problem("missing", np.flatnonzero(no_forward), _absent(leaves, FORWARD))
    if (no_whole & no_first & no_second).all():
        return  # forward only
    yield Problem("missing", np.flatnonzero(no_whole & no_first & no_second), _absent(leaves, FULL_BACKWARD))
    yield Problem("missing", np.flatnonzero(no_whole & ~no_first & no_second), _absent(leaves, BACKWARD_WEIGHT))
    yield Problem("missing", np.flatnonzero(no_whole & no_first & ~no_second), _absent(leaves, BACKWARD_INPUT))
    halves = np.where(no_first, leaves.places(BACKWARD_WEIGHT), leaves.places(BACKWARD_INPUT))
    yield Problem(
        "backward_twice",
        halves[~no_whole & ~(no_first & no_second)],
        at(leaves, "backward_twice", "{} is half of a backward that is there as a whole too", "keep one of the two"),
    )


def _absent(leaves: Leaves, kind: ComputationType) -> Callable[[int], Finding]:
    def tell(slot: int) -> Finding:
        stage, microbatch = divmod(slot, leaves.schedule.microbatches)
        action, rank = Action(stage, kind, microbatch), int(leaves.home[stage])
        return Finding("missing", rank, None, action, f"{action} is missing", f"add it to rank {rank}")

    return tell
