"""What the passes have in common: taking a schedule apart into codes and putting it together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.ir.packed import Codes


def ranks_of(schedule: Schedule) -> NDArray[np.int64]:
    """The rank of every code."""
    return np.repeat(np.arange(schedule.ranks), np.diff(schedule.offsets))


def without_idle(schedule: Schedule) -> Schedule:
    """Drop the idle steps: they take no time, and a lowered schedule has none."""
    busy = schedule.codes != packed.IDLE
    return schedule if busy.all() else rebuilt(schedule, schedule.codes[busy], ranks_of(schedule)[busy])


def rebuilt(schedule: Schedule, codes: Codes, ranks: NDArray[np.int64]) -> Schedule:
    """The same schedule with these actions, which are in the order of their ranks."""
    ends = np.cumsum(np.bincount(ranks, minlength=schedule.ranks))
    return Schedule.from_codes(
        np.split(codes, ends[:-1]),
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        metadata=schedule.metadata,
    )
