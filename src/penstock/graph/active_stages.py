"""Which stages a rank will run next, at every step of its row: what decides which parameters it holds."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.graph.walk import worth_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

#: The stages that come or go before a place in the row.
Changes = dict[int, list[int]]


def soonest_stages(stages: Ints, cells: Ints, limit: int) -> tuple[Changes, Changes]:
    """The stages that leave and enter the ``limit`` soonest used ones, before each cell of the row.

    What an overlap runs together counts together: it may exceed the limit by what it holds. O(n) times the stages of
    the rank times the limit.
    """
    names, local = np.unique(stages, return_inverse=True)
    following = _next_uses(local)
    scan = _compiled() if worth_compiling(len(stages) * len(names)) else _scan
    places, changed, enters = scan(local.astype(np.int64), cells, following, len(names), limit)
    leaving: Changes = defaultdict(list)
    entering: Changes = defaultdict(list)
    for place, stage, enter in zip(places.tolist(), names[changed].tolist(), enters.tolist(), strict=True):
        (entering if enter else leaving)[place].append(stage)
    return leaving, entering


def _next_uses(local: Ints) -> Ints:
    """Where the same stage is used next, or the end. O(n log n): one sort."""
    following = np.full(len(local), len(local), np.int64)
    order = np.argsort(local, kind="stable")
    same = local[order][1:] == local[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    return following


def _scan(  # noqa: C901 - one loop over arrays, to be compiled
    local: Ints, cells: Ints, following: Ints, count: int, limit: int
) -> tuple[Ints, Ints, Ints]:
    end = len(local)
    upcoming = np.full(count, end, np.int64)
    for place in range(end - 1, -1, -1):
        upcoming[local[place]] = place
    active = np.zeros(count, np.bool_)
    wanted = np.zeros(count, np.bool_)
    order = np.zeros(count, np.int64)
    places = np.zeros(2 * (end + count), np.int64)
    changed = np.zeros(2 * (end + count), np.int64)
    enters = np.zeros(2 * (end + count), np.int64)
    changes = 0
    for place in range(end):
        if place > 0 and cells[place] == cells[place - 1]:
            upcoming[local[place]] = following[place]
            continue
        # The soonest stages, in the order of their next use.
        chosen = 0
        wanted[:] = False
        while chosen < count:
            best = -1
            for stage in range(count):
                if not wanted[stage] and upcoming[stage] < end and (best < 0 or upcoming[stage] < upcoming[best]):
                    best = stage
            if best < 0:
                break
            if chosen >= limit and cells[upcoming[best]] != cells[upcoming[order[chosen - 1]]]:
                break
            wanted[best] = True
            order[chosen] = best
            chosen += 1
        for stage in range(count):
            if active[stage] and not wanted[stage]:
                active[stage] = False
                places[changes], changed[changes], enters[changes] = place, stage, 0
                changes += 1
        for slot in range(chosen):
            stage = order[slot]
            if not active[stage]:
                active[stage] = True
                places[changes], changed[changes], enters[changes] = place, stage, 1
                changes += 1
        upcoming[local[place]] = following[place]
    return places[:changes], changed[:changes], enters[:changes]


@cache
def _compiled() -> Callable[..., Any]:
    from numba import njit

    compiled: Callable[..., Any] = njit(cache=True)(_scan)
    return compiled
