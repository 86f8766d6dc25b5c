"""No rank holds more activations than its memory has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.graph.action_table import NOWHERE
from penstock.ir.actions import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.verification.findings import Finding, Problem, action_at, at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.action_table import Leaves, Places

#: What releases the activations of its stage and microbatch; an I needs them no less than the W after it.
RELEASING: Final = (FULL_BACKWARD, BACKWARD_WEIGHT)


def over_memory(leaves: Leaves, limit: float) -> Iterator[Problem]:
    """Ranks that hold more activations than the limit, at the first action where they do.

    One is held for a stage and a microbatch from its F to its B or W.
    """
    held = _held(leaves)
    over = np.flatnonzero(held > limit)
    _, first_over = np.unique(leaves.rank[over], return_index=True)

    def tell(place: int) -> Finding:
        noun = "activation" if held[place] == 1 else "activations"
        words = f"with {{}} the rank holds {held[place]} {noun}, and {limit} is the limit"
        return at(leaves, "memory", words, _release(leaves, place))(place)

    yield Problem("memory", over[first_over], tell)


def peaks(leaves: Leaves) -> list[int]:
    """How many activations each rank holds at most."""
    most = np.zeros(leaves.schedule.ranks, np.int64)
    np.maximum.at(most, leaves.rank, _held(leaves))
    return [int(number) for number in most]


def _held(leaves: Leaves) -> Places:
    """How many activations the rank holds with each action; what runs together is held together."""
    change = np.zeros(len(leaves), np.int64)
    change[leaves.are(FORWARD)] = 1
    change[leaves.are(*RELEASING)] = -1
    # In an overlap the forwards count before the backwards.
    order = np.lexsort([-change, leaves.cell])
    total = np.cumsum(change[order])
    first = np.searchsorted(leaves.rank, np.arange(leaves.schedule.ranks))
    before = np.append(0, total)[first]
    held = np.empty(len(leaves), np.int64)
    held[order] = total - before[leaves.rank[order]]
    return held


def _release(leaves: Leaves, place: int) -> str:
    """What to run before this forward: what releases the activation of another microbatch that is held longest."""
    forwards = leaves.are(FORWARD)
    forwards = forwards[(forwards < place) & (leaves.rank[forwards] == leaves.rank[place]) & leaves.in_range[forwards]]
    forwards = forwards[leaves.microbatch[forwards] != leaves.microbatch[place]]
    releases = leaves.find_any(RELEASING, leaves.stage[forwards], leaves.microbatch[forwards])
    releases = releases[(releases != NOWHERE) & (leaves.cell[releases] >= leaves.cell[place])]
    if not len(releases):
        return "raise the limit: there is no B or W to run before it"
    split = ": an I releases nothing, only a W or B does" if len(leaves.are(BACKWARD_WEIGHT)) else ""
    return f"run {action_at(leaves, releases[0])} before it{split}"
