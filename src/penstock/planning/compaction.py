"""Repeats and compacts building blocks, compiled: the same orders as ``schedules/building_blocks.py``, in microseconds.

There the algorithm is explained. Here all ranks look for their next action at every tick, which is no waste, because
most of them run one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.graph.jit import jit
from penstock.planning.kernels import compaction as kernels
from penstock.planning.orders import KINDS, F, I, Order, W

if TYPE_CHECKING:
    from numpy.typing import NDArray

    AnyInts = NDArray[np.signedinteger[Any]]

#: By the number of a pass: its kind, and whether it is of the second stage of its rank.
_KIND: Final = np.array([F, F, I, I, W, W], np.int32)
_IS_SECOND: Final = np.array([False, True, True, False, True, False])


@dataclass(frozen=True, slots=True, eq=False)
class Compacted:
    """An order, and what it takes if every action takes one tick and transfers take none.

    Attributes:
        passes: what each rank runs, a row for each: F0, F1, I1, I0, W1 and W0 are numbered in this order.
        makespan: the number of ticks.
        span: the most ticks from the first to the last action of a rank.
        limit: the most activations that a rank may hold until W.
    """

    passes: NDArray[np.int8]
    makespan: int
    span: int
    limit: int

    @property
    def order(self) -> Order:
        """The order of all actions, W included."""
        ranks, length = self.passes.shape
        first = np.arange(ranks, dtype=np.int32)[:, np.newaxis]
        stage = np.where(_IS_SECOND[self.passes], 2 * ranks - 1 - first, first)
        tokens = stage * np.int32(KINDS) + _KIND[self.passes]
        return Order(np.arange(0, (ranks + 1) * length, length), tokens.ravel())


def compact(blocks: AnyInts, microbatches: int, limit: int = 0) -> Compacted | None:
    """Return the compacted order of these blocks, a row of F0, F1, I1 and I0 for each rank.

    O(actions x ranks / busy ranks), and O(limit) for each action that runs before its turn.

    Args:
        blocks: the ticks at which each rank runs its passes of microbatch 0.
        microbatches: how many there are.
        limit: the memory to compact within, in activations of a stage, if more than the plain repetition holds.

    Returns:
        The order; None if two passes of a rank fall on one tick, or if passes come before what they wait for and the
        order therefore cannot run.

    >>> compacted = compact(np.array([[0, 3, 4, 7], [1, 2, 5, 6]]), microbatches=1)
    >>> compacted.makespan, [row.tolist() for row in compacted.order.rows]
    (9, [[0, 12, 13, 14, 1, 2], [4, 8, 9, 5, 10, 6]])
    """
    passes, places, live, peak = jit(kernels.repeat)(np.ascontiguousarray(blocks, np.int32), microbatches)
    if peak < 0:
        return None
    limit = max(limit, peak)
    ran, makespan, span = jit(kernels.run)(passes, places, live, limit)
    return Compacted(ran, makespan, span, limit) if makespan >= 0 else None
