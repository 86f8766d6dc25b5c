"""Merges streams of actions that run side by side, each some ticks behind the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed

if TYPE_CHECKING:
    from penstock.ir.actions import ComputationType
    from penstock.ir.packed import Codes


def stream(stage: int, kind: ComputationType, microbatches: int) -> Codes:
    """Return one type of action of one stage, for microbatches 0, 1, 2, ..."""
    return packed.pack(stage, kind, np.arange(microbatches))


def merge_streams(*lagged: tuple[int, Codes]) -> Codes:
    """Take, at each tick, the next action of every (lag, stream) that has begun and has not ended.

    1F1B on rank r of p merges forwards with backwards that lag p - 1 - r ticks behind: warm-up, steady state and
    cool-down all follow from it. A stream that would begin after all the others have ended follows them at once, so any
    number of microbatches works.
    """
    starts: list[int] = []
    ticks = 0
    for lag, codes in lagged:
        starts.append(min(lag, ticks))
        ticks = max(ticks, starts[-1] + len(codes))
    table = np.full((ticks, len(lagged)), packed.IDLE, np.int64)
    for column, (start, (_, codes)) in enumerate(zip(starts, lagged, strict=True)):
        table[start : start + len(codes), column] = codes
    merged = table.ravel()
    kept: Codes = merged[merged != packed.IDLE]
    return kept
