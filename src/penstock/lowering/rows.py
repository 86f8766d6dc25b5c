"""Helpers shared by the passes: turning a schedule into an action table and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.graph.action_table import NONE, ActionTable
from penstock.ir import packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.graph.action_table import Positions
    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule


def table_of(schedule: Schedule | ActionTable) -> ActionTable:
    """Return the action table of a schedule without idle steps; a table without any is returned unchanged."""
    actions = schedule if isinstance(schedule, ActionTable) else ActionTable(schedule)
    if len(actions) == len(actions.schedule.codes):
        return actions
    return ActionTable(with_actions(actions.schedule, actions.codes, actions.rank))


def ranks_of(schedule: Schedule) -> NDArray[np.int64]:
    """Return the rank of every code."""
    return np.repeat(np.arange(schedule.ranks), np.diff(schedule.offsets))


def without_idle(schedule: Schedule) -> Schedule:
    """Drop the idle steps: they take no time, and a lowered schedule has none."""
    busy = schedule.codes != packed.IDLE
    return schedule if busy.all() else with_actions(schedule, schedule.codes[busy], ranks_of(schedule)[busy])


def with_actions(schedule: Schedule, codes: Codes, ranks: NDArray[np.signedinteger[Any]]) -> Schedule:
    """Replace the actions of a schedule; the new ones are in rank order."""
    return schedule.with_codes(codes, ranks.searchsorted(np.arange(schedule.ranks + 1, dtype=ranks.dtype)))


class Additions(NamedTuple):
    """Actions to insert into a schedule.

    Attributes:
        positions: the position of the action that each is inserted before.
        codes: the packed actions.
        ranks: the rank of each.
    """

    positions: Positions
    codes: Codes
    ranks: Positions


def insert(actions: ActionTable, *additions: Additions) -> Schedule:
    """Insert actions; of several at the same position, those of the first argument come first."""
    positions, codes, ranks = map(np.concatenate, zip(*additions, strict=True))
    order = positions.argsort(kind="stable")
    schedule, after = actions.schedule, positions[order] + np.arange(len(order))
    stays = np.ones(len(actions) + len(order), bool)
    stays[after] = False
    every = np.empty(len(stays), np.int64)
    every[after], every[stays] = codes[order], actions.codes
    return schedule.with_codes(every, schedule.offsets + ranks[order].searchsorted(np.arange(schedule.ranks + 1)))


def cell_ends(actions: ActionTable, positions: Positions) -> Positions:
    """Return where the cell of each of these positions ends, which may be an overlap."""
    return np.asarray(actions.cell.searchsorted(actions.cell[positions], side="right"))


def last_of_each_stage(actions: ActionTable, positions: Positions) -> Positions:
    """Return the last of these positions for each of their stages, in order."""
    stage = actions.stages_at(positions)
    if not actions.all_in_range:  # large stage numbers would not fit into a table
        _, from_the_end = np.unique(stage[::-1], return_index=True)
        return np.sort(positions[::-1][from_the_end])
    last = np.full(actions.stages, NONE, np.int64)
    last[stage] = positions  # of several, the last stays
    return np.sort(last[last != NONE])
