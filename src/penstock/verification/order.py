"""Checks that on each rank, an action comes after what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.verification.findings import Finding, Problem, action_at, rank_and_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.action_table import ActionTable, Positions

_KINDS: Final = {
    FORWARD: "forward_before_input",
    FULL_BACKWARD: "backward_before_input",
    BACKWARD_INPUT: "backward_before_input",
    BACKWARD_WEIGHT: "weight_before_input",
}


def check_order(actions: ActionTable) -> Iterator[Problem]:
    """Find actions that come before what they need."""
    if not any(_late(actions, *part).any() for part in actions.input_blocks):
        return
    waiting, awaited = actions.inputs
    late = _late(actions, waiting, awaited)
    waiting, awaited = waiting[late], awaited[late]

    def describe(number: int) -> Finding:
        action, need = action_at(actions, waiting[number]), action_at(actions, awaited[number])
        (rank, step), (_, later) = rank_and_step(actions, waiting[number]), rank_and_step(actions, awaited[number])
        when = "runs together with it" if later == step else f"comes later, at step {later}"
        return Finding(
            _KINDS[action.computation_type],
            rank,
            step,
            action,
            f"{action} needs {need}, which {when}",
            f"move {need} before it",
            ((rank, step), (rank, later)),
        )

    for kind, name in _KINDS.items():
        yield Problem(name, actions.is_kind(waiting, kind).nonzero()[0], describe)


def _late(actions: ActionTable, waiting: Positions, awaited: Positions) -> NDArray[np.bool_]:
    """Return for each pair on the same rank whether the awaited action does not come first."""
    return np.asarray(
        (actions.cell[awaited] >= actions.cell[waiting]) & (actions.rank[awaited] == actions.rank[waiting])
    )
