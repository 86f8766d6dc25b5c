"""Which stages a rank will run next, at every step of its row: what decides which parameters it holds."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.jit import compiled
from penstock.graph.longest_path import worth_compiling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

#: The stages that come or go before a place in the row.
Changes = dict[int, list[int]]


def soonest_stages(stages: Ints, cells: Ints, limit: int) -> tuple[Changes, Changes]:
    """The stages that leave and enter the ``limit`` soonest used ones, before each cell of the row.

    What an overlap runs together counts together: it may exceed the limit by what it holds. O(n) after the stages are
    numbered.
    """
    names, local = np.unique(stages, return_inverse=True)
    scan = compiled(_scan) if worth_compiling(len(stages)) else _scan
    places, changed, enters = scan(local.astype(np.int64), cells, len(names), limit)
    leaving: Changes = defaultdict(list)
    entering: Changes = defaultdict(list)
    for place, stage, enter in zip(places.tolist(), names[changed].tolist(), enters.tolist(), strict=True):
        (entering if enter else leaving)[place].append(stage)
    return leaving, entering


def _scan(local: Ints, cells: Ints, count: int, limit: int) -> tuple[Ints, Ints, Ints]:
    """A window over the row, from a cell on as far as the soonest stages reach: both its ends only go forward."""
    length = len(local)
    uses = np.zeros(count, np.int64)  # of each stage, within the window
    active = np.zeros(count, np.bool_)
    distinct, begin, end = 0, 0, 0
    places = np.zeros(2 * length, np.int64)
    changed = np.zeros(2 * length, np.int64)
    enters = np.zeros(2 * length, np.int64)
    changes = 0
    for place in range(length):
        if place > 0 and cells[place] == cells[place - 1]:
            continue
        for passed in range(begin, place):
            uses[local[passed]] -= 1
            distinct -= uses[local[passed]] == 0
        while end < length and (distinct < limit or cells[end] == cells[end - 1]):
            stage = local[end]
            distinct += uses[stage] == 0
            uses[stage] += 1
            end += 1
            if not active[stage]:
                active[stage] = True
                places[changes], changed[changes], enters[changes] = place, stage, 1
                changes += 1
        for passed in range(begin, place):
            stage = local[passed]
            if active[stage] and uses[stage] == 0:
                active[stage] = False
                places[changes], changed[changes], enters[changes] = place, stage, 0
                changes += 1
        begin = place
    return places[:changes], changed[:changes], enters[:changes]
