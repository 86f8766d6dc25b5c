"""Every stage runs every microbatch exactly once, on its own rank, forward and (if there is any) backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.leaves import NOWHERE
from penstock.ir import packed
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    SHARDING,
    Action,
    ComputationType,
)
from penstock.verification.findings import Finding, Problem, action_at, at, position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.graph.leaves import Leaves


def misplaced(leaves: Leaves) -> Iterator[Problem]:
    """Actions on a rank that does not hold their stage, and microbatches that there are not."""
    schedule = leaves.schedule
    if leaves.all_in_range and (leaves.home[leaves.stage] == leaves.rank).all():
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
    keys = np.sort(leaves.codes[leaves.microbatch >= 0] & ~packed.JOINED)
    if not (keys[1:] == keys[:-1]).any():
        return
    present = np.bincount(leaves.kind, minlength=len(ComputationType) + 1)
    for kind in ComputationType:
        if present[packed.TYPE_NUMBER[kind]] and kind not in SHARDING:
            mine = leaves.are(kind)
            mine = mine[leaves.in_range[mine]]
            again = mine[leaves.find(kind, leaves.stage[mine], leaves.microbatch[mine]) != mine]
            yield Problem("repeated", again, at(leaves, "repeated", "{} is there a second time", "drop it"))


def missing(leaves: Leaves) -> Iterator[Problem]:
    """What a stage does not do for a microbatch, and a backward that is there both whole and in halves."""
    forward, whole, first, second = (
        leaves.table(kind) for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    no_forward, no_whole = forward == NOWHERE, whole == NOWHERE
    no_first, no_second = first == NOWHERE, second == NOWHERE
    if not no_forward.any() and (no_first == no_second).all() and (no_whole != no_first).all():
        return  # everything forward, and everything backward either whole or in its two halves
    yield Problem("missing", np.flatnonzero(no_forward), _absent(leaves, FORWARD))
    if (no_whole & no_first & no_second).all():
        return  # forward only
    yield Problem("missing", np.flatnonzero(no_whole & no_first & no_second), _absent(leaves, FULL_BACKWARD))
    yield Problem("missing", np.flatnonzero(no_whole & ~no_first & no_second), _absent(leaves, BACKWARD_WEIGHT))
    yield Problem("missing", np.flatnonzero(no_whole & no_first & ~no_second), _absent(leaves, BACKWARD_INPUT))
    both = np.flatnonzero(~no_whole & ~(no_first & no_second))
    halves = np.where(first[both] == NOWHERE, second[both], first[both])
    yield Problem(
        "backward_twice",
        halves,
        at(leaves, "backward_twice", "{} is half of a backward that is there as a whole too", "keep one of the two"),
    )


def _absent(leaves: Leaves, kind: ComputationType) -> Callable[[int], Finding]:
    def tell(slot: int) -> Finding:
        stage, microbatch = divmod(slot, leaves.schedule.microbatches)
        action, rank = Action(stage, kind, microbatch), int(leaves.home[stage])
        return Finding("missing", rank, None, action, f"{action} is missing", f"add it to rank {rank}")

    return tell
