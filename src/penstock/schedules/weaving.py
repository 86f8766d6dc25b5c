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


def weave(*lagged: tuple[int, Codes]) -> Codes:
    """At each tick, the next action of every (lag, stream) that has begun by then and has not ended.

    1F1B on rank r of p is forwards woven with backwards that lag p - 1 - r ticks behind: the fill, the steady state
    and the drain all follow from it, for any number of microbatches.
    """
    ticks = max(lag + len(codes) for lag, codes in lagged)
    table = np.full((ticks, len(lagged)), packed.IDLE, np.int64)
    for column, (lag, codes) in enumerate(lagged):
        table[lag : lag + len(codes), column] = codes
    woven = table.ravel()
    kept: Codes = woven[woven != packed.IDLE]
    return kept
