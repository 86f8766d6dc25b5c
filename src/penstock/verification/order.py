"""On its own rank, what an action needs comes before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.verification.findings import Finding, Problem, action_at, position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.leaves import Leaves

_KINDS: Final = {
    FORWARD: "forward_before_input",
    FULL_BACKWARD: "backward_before_input",
    BACKWARD_INPUT: "backward_before_input",
    BACKWARD_WEIGHT: "weight_before_input",
}


def disordered(leaves: Leaves) -> Iterator[Problem]:
    """Actions that come before what they need."""
    waiting, awaited = leaves.inputs
    late = (leaves.cell[awaited] >= leaves.cell[waiting]) & (leaves.rank[awaited] == leaves.rank[waiting])
    if not late.any():
        return
    waiting, awaited = waiting[late], awaited[late]

    def tell(number: int) -> Finding:
        action, need = action_at(leaves, waiting[number]), action_at(leaves, awaited[number])
        (rank, step), (_, later) = position(leaves, waiting[number]), position(leaves, awaited[number])
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
        yield Problem(name, leaves.is_kind(waiting, kind).nonzero()[0], tell)
