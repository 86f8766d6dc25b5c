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
    total = np.cumsum(change)
    starts = np.flatnonzero(np.append(True, np.diff(leaves.rank) > 0)) if len(leaves) else np.empty(0, np.int64)
    before = np.repeat(total[starts] - change[starts], np.diff(np.append(starts, len(leaves))))
    held = total - before
    over = np.flatnonzero(held > limit)
    _, first = np.unique(leaves.rank[over], return_index=True)

    def tell(place: int) -> Finding:
        words = f"with {{}} the rank holds {held[place]} activations, and {limit:g} is the limit"
        return at(leaves, "memory", words, "run a backward before it")(place)

    yield Problem("memory", over[first], tell)
