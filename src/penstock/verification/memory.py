"""No rank holds more activations than its memory has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.actions import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.verification.findings import Finding, Problem, at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.leaves import Leaves


def over_memory(leaves: Leaves, limit: float) -> Iterator[Problem]:
    """Ranks that hold more activations than the limit, at the first action where they do.

    One is held for a stage and a microbatch from its F to its B or W.
    """
    change = np.zeros(len(leaves), np.int64)
    change[leaves.are(FORWARD)] = 1
    change[leaves.are(FULL_BACKWARD, BACKWARD_WEIGHT)] = -1
    # What runs together is held together: in an overlap the forwards count before the backwards.
    order = np.lexsort([-change, leaves.cell])
    total = np.cumsum(change[order])
    ranks = leaves.rank[order]
    first = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1])) if len(leaves) else np.empty(0, np.int64)
    before = np.repeat(total[first] - change[order][first], np.diff(np.append(first, len(leaves))))
    held = np.empty(len(leaves), np.int64)
    held[order] = total - before
    over = order[(total - before) > limit]
    _, first_over = np.unique(leaves.rank[over], return_index=True)

    def tell(place: int) -> Finding:
        words = f"with {{}} the rank holds {held[place]} activations, and {limit} is the limit"
        return at(leaves, "memory", words, "run a backward before it")(place)

    yield Problem("memory", over[first_over], tell)
