"""What the passes have in common: taking a schedule apart into codes and putting it together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.ir import packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule


def ranks_of(schedule: Schedule) -> NDArray[np.int64]:
    """The rank of every code."""
    return np.repeat(np.arange(schedule.ranks), np.diff(schedule.offsets))


def without_idle(schedule: Schedule) -> Schedule:
    """Drop the idle steps: they take no time, and a lowered schedule has none."""
    busy = schedule.codes != packed.IDLE
    return schedule if busy.all() else rebuilt(schedule, schedule.codes[busy], ranks_of(schedule)[busy])


def rebuilt(schedule: Schedule, codes: Codes, ranks: NDArray[np.signedinteger[Any]]) -> Schedule:
    """The same schedule with these actions, which are in the order of their ranks."""
    return schedule.with_codes(codes, np.searchsorted(ranks, np.arange(schedule.ranks + 1)))


def cell_ends(codes: Codes, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the cell of each of these places ends: behind the whole of an overlap."""
    starts = np.append(packed.cell_starts(codes), len(codes))
    return np.asarray(starts[np.searchsorted(starts, places, side="right")])


def last_of_each_stage(stages: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last of these places, which are in order, for every stage that they are of, in order."""
    mine = stages[places]
    if mine.max(initial=0) > 2 * len(mine) + 1000:  # numbers so far apart would not fit into a table
        _, from_the_end = np.unique(mine[::-1], return_index=True)
        return np.sort(places[::-1][from_the_end])
    last = np.full(mine.max(initial=0) + 1, -1, np.int64)
    last[mine] = places  # of several the last stays
    return np.sort(last[last >= 0])
