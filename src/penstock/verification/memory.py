"""Checks that no rank holds more activations than fit into its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.graph.action_table import NONE
from penstock.ir.actions import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.verification.findings import Finding, Problem, action_at, describe_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.action_table import ActionTable, Positions

#: The types that release the activations of their stage and microbatch; an I does not, since the W still needs them.
RELEASING: Final = (FULL_BACKWARD, BACKWARD_WEIGHT)


def check_memory(actions: ActionTable, limit: float) -> Iterator[Problem]:
    """Find ranks that exceed the limit, at the first action that does.

    A rank holds one activation per stage and microbatch, from the F to the B or W.
    """
    held = _held(actions)
    over = np.flatnonzero(held > limit)
    _, first_over = np.unique(actions.rank[over], return_index=True)

    def describe(position: int) -> Finding:
        noun = "activation" if held[position] == 1 else "activations"
        words = f"{{}} brings the rank to {held[position]} {noun}; the limit is {limit}"
        return describe_at(actions, "memory", words, _release(actions, position))(position)

    yield Problem("memory", over[first_over], describe)


def peaks(actions: ActionTable) -> list[int]:
    """Return the most activations that each rank holds."""
    most = np.zeros(actions.schedule.ranks, np.int64)
    np.maximum.at(most, actions.rank, _held(actions))
    return [int(number) for number in most]


def _held(actions: ActionTable) -> Positions:
    """Return how many activations the rank holds with each action; sub-actions of an overlap count together."""
    change = np.zeros(len(actions), np.int64)
    change[actions.positions_of(FORWARD)] = 1
    change[actions.positions_of(*RELEASING)] = -1
    # In an overlap the forwards count before the backwards.
    order = np.lexsort([-change, actions.cell])
    total = np.cumsum(change[order])
    first = np.searchsorted(actions.rank, np.arange(actions.schedule.ranks))
    before = np.append(0, total)[first]
    held = np.empty(len(actions), np.int64)
    held[order] = total - before[actions.rank[order]]
    return held


def _release(actions: ActionTable, position: int) -> str:
    """Suggest what to run before this forward: the release of the activation that is held longest."""
    forwards = actions.positions_of(FORWARD)
    forwards = forwards[
        (forwards < position) & (actions.rank[forwards] == actions.rank[position]) & actions.in_range[forwards]
    ]
    forwards = forwards[actions.microbatch[forwards] != actions.microbatch[position]]
    releases = actions.find_any(RELEASING, actions.stage[forwards], actions.microbatch[forwards])
    releases = releases[(releases != NONE) & (actions.cell[releases] >= actions.cell[position])]
    if not len(releases):
        return "raise the limit: no B or W can run before it"
    split = ": an I releases nothing, only a B or W does" if len(actions.positions_of(BACKWARD_WEIGHT)) else ""
    return f"run {action_at(actions, releases[0])} before it{split}"
