"""Finds the stages that a rank will run next, at every step of its row; they decide which parameters it holds."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.jit import jit
from penstock.graph.longest_path import should_compile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

#: The stages that enter or leave before a position in the row.
Changes = dict[int, list[int]]


def active_stage_changes(stages: Ints, cells: Ints, limit: int) -> tuple[Changes, Changes]:
    """Return the stages that leave and enter the set of the next ``limit`` stages, before each cell of the row.

    The stages of an overlap enter together, so they may exceed the limit. O(n) once the stages are numbered.
    """
    names, local = np.unique(stages, return_inverse=True)
    scan = jit(_scan) if should_compile(len(stages)) else _scan
    positions, changed, enters = scan(local.astype(np.int64), cells, len(names), limit)
    leaving: Changes = defaultdict(list)
    entering: Changes = defaultdict(list)
    for position, stage, enter in zip(positions.tolist(), names[changed].tolist(), enters.tolist(), strict=True):
        (entering if enter else leaving)[position].append(stage)
    return leaving, entering


def _scan(local: Ints, cells: Ints, count: int, limit: int) -> tuple[Ints, Ints, Ints]:
    """Slide a window over the row, from a cell to the last of its next stages; both ends only move forward."""
    length = len(local)
    uses = np.zeros(count, np.int64)  # of each stage, within the window
    active = np.zeros(count, np.bool_)
    distinct, begin, end = 0, 0, 0
    positions = np.zeros(2 * length, np.int64)
    changed = np.zeros(2 * length, np.int64)
    enters = np.zeros(2 * length, np.int64)
    changes = 0
    for position in range(length):
        if position > 0 and cells[position] == cells[position - 1]:
            continue
        for passed in range(begin, position):
            uses[local[passed]] -= 1
            distinct -= uses[local[passed]] == 0
        while end < length and (distinct < limit or cells[end] == cells[end - 1]):
            stage = local[end]
            distinct += uses[stage] == 0
            uses[stage] += 1
            end += 1
            if not active[stage]:
                active[stage] = True
                positions[changes], changed[changes], enters[changes] = position, stage, 1
                changes += 1
        for passed in range(begin, position):
            stage = local[passed]
            if active[stage] and uses[stage] == 0:
                active[stage] = False
                positions[changes], changed[changes], enters[changes] = position, stage, 0
                changes += 1
        begin = position
    return positions[:changes], changed[:changes], enters[:changes]
