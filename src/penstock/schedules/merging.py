"""The loom for schedules that are streams of actions running side by side, each some ticks behind the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed

if TYPE_CHECKING:
    from penstock.ir.actions import ComputationType
    from penstock.ir.packed import Codes


def stream(stage: int, kind: ComputationType, microbatches: int) -> Codes:
    """One kind of action of one stage, for microbatch 0, 1, 2, ..."""
    return packed.pack(stage, kind, np.arange(microbatches))


def merge_streams(*lagged: tuple[int, Codes]) -> Codes:
    """At each tick, the next action of every (lag, stream) that has begun by then and has not ended.

    1F1B on rank r of p is forwards woven with backwards that lag p - 1 - r ticks behind: the fill, the steady state
    and the drain all follow from it. A stream that would begin after all before it have ended follows at once, so any
    number of microbatches will do.
    """
    starts: list[int] = []
    ticks = 0
    for lag, codes in lagged:
        starts.append(min(lag, ticks))
        ticks = max(ticks, starts[-1] + len(codes))
    table = np.full((ticks, len(lagged)), packed.IDLE, np.int64)
    for column, (start, (_, codes)) in enumerate(zip(starts, lagged, strict=True)):
        table[start : start + len(codes), column] = codes
    woven = table.ravel()
    kept: Codes = woven[woven != packed.IDLE]
    return kept
