"""Extracts the forwards of a schedule, for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import FORWARD

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule


def forwards_of(schedule: Schedule) -> Schedule:
    """Keep only the forwards, in order, taken out of overlaps. O(n).

    >>> from penstock.ir.schedule import Schedule
    >>> schedule = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]])
    >>> print(forwards_of(schedule).grid(aligned=False))
    step   0   1
    rank 0 0F0 0F1
    rank 1 1F0 1F1
    """
    forwards = packed.types(schedule.codes) == packed.TYPE_NUMBER[FORWARD]
    codes = schedule.codes[forwards] & ~packed.JOINED
    return schedule.with_codes(codes, np.append(0, forwards.cumsum())[schedule.offsets])
