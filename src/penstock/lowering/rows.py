"""What the passes have in common: taking a schedule apart into codes and putting it together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.graph.action_table import NOWHERE, Leaves
from penstock.ir import packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.graph.action_table import Places
    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule


def taken_apart(schedule: Schedule | Leaves) -> Leaves:
    """The actions of a schedule without its idle steps; as they are if somebody has taken it apart already."""
    leaves = schedule if isinstance(schedule, Leaves) else Leaves(schedule)
    if len(leaves) == len(leaves.schedule.codes):
        return leaves
    return Leaves(rebuilt(leaves.schedule, leaves.codes, leaves.rank))


def ranks_of(schedule: Schedule) -> NDArray[np.int64]:
    """The rank of every code."""
    return np.repeat(np.arange(schedule.ranks), np.diff(schedule.offsets))


def without_idle(schedule: Schedule) -> Schedule:
    """Drop the idle steps: they take no time, and a lowered schedule has none."""
    busy = schedule.codes != packed.IDLE
    return schedule if busy.all() else rebuilt(schedule, schedule.codes[busy], ranks_of(schedule)[busy])


def rebuilt(schedule: Schedule, codes: Codes, ranks: NDArray[np.signedinteger[Any]]) -> Schedule:
    """The same schedule with these actions, which are in the order of their ranks."""
    return schedule.with_codes(codes, ranks.searchsorted(np.arange(schedule.ranks + 1, dtype=ranks.dtype)))


def inserted(leaves: Leaves, places: Places, codes: Codes, ranks: Places) -> Schedule:
    """The same schedule with more actions: each before the one at its place, on its rank; they come in order."""
    schedule, after = leaves.schedule, places + np.arange(len(places))
    stays = np.ones(len(leaves) + len(places), bool)
    stays[after] = False
    every = np.empty(len(stays), np.int64)
    every[after], every[stays] = codes, leaves.codes
    return schedule.with_codes(every, schedule.offsets + ranks.searchsorted(np.arange(schedule.ranks + 1)))


def cell_ends(leaves: Leaves, places: Places) -> Places:
    """Where the cell of each of these places ends: behind the whole of an overlap."""
    return np.asarray(leaves.cell.searchsorted(leaves.cell[places], side="right"))


def last_of_each_stage(leaves: Leaves, places: Places) -> Places:
    """The last of these places for every stage that they are of, in order."""
    stage = leaves.stages_at(places)
    if not leaves.all_in_range:  # numbers far apart would not fit into a table
        _, from_the_end = np.unique(stage[::-1], return_index=True)
        return np.sort(places[::-1][from_the_end])
    last = np.full(leaves.stages, NOWHERE, np.int64)
    last[stage] = places  # of several the last stays
    return np.sort(last[last != NOWHERE])
