"""Finds building blocks for ranks with two stages in a V: schedules for any memory between V-Min and ZB-V.

V-Half, V-Min and ZB-V repeat a block in which a microbatch goes down and up the V at constant speeds. Between their
memory limits, the best blocks change their speeds once on the way. All of these are enumerated; what the plain
repetition of a block holds follows from the block. How long the compacted order takes does not, but the best are nearly
always among the blocks whose activations live longest, or which end soonest: only those are compacted.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.graph.jit import jit
from penstock.planning.compaction import Compacted, compact
from penstock.planning.kernels.block_family import enumerate_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]

#: The most ticks that a pass takes from one rank to the next: with four, blocks reach the memory of ZB-V.
_SLOWEST: Final = 4
#: How many of the blocks that live longest, and of those that end soonest, are compacted for each amount of memory.
_CANDIDATES: Final = 100
#: Blocks are compared with this many microbatches per rank: warm-up and cool-down are then apart.
_PER_RANK: Final = 2
#: The most blocks that are enumerated.
_MOST_BLOCKS: Final = 200_000
#: The most ranks at which speeds change, for many ranks.
_CHANGES: Final = 8


def best_orders(ranks: int, microbatches: int, memory: int, most: int = 3) -> list[Compacted]:
    """Return the best orders that hold at most ``memory`` activations of a stage on any rank.

    At equal costs, with 2p or more microbatches on up to 12 ranks, the span is at most 3 ticks above the closed form
    of the V family, 6m + max(0, 6p - 1 - 3 * memory). No order is returned if no block holds so little.

    >>> [order.span - 6 * 12 for order in best_orders(ranks=4, microbatches=12, memory=6)]
    [5, 5, 5]
    """
    found = [compact(block, microbatches, memory) for block in best_blocks(ranks, memory)[:most]]
    return [order for order in found if order is not None]


@lru_cache(maxsize=256)
def best_blocks(ranks: int, memory: int) -> tuple[Ints, ...]:
    """Return the best blocks for this much memory, or for the most below it that any block holds; the best first.

    They are compared by span, then by makespan, at equal costs.
    """
    blocks, held = _family(ranks)
    held_most = held[held <= memory].max(initial=0)
    candidates = _candidates(blocks[held == held_most])
    compacted = [compact(block, _PER_RANK * ranks, memory) for block in candidates]
    qualities = [(each.span, each.makespan) if each else (2**30, 0) for each in compacted]
    return tuple(candidates[each] for each in sorted(range(len(candidates)), key=qualities.__getitem__))


def _candidates(blocks: Ints) -> Ints:
    """Return the blocks that live longest, and those that end soonest."""
    lives = (blocks[:, :, 3] - blocks[:, :, 0] + blocks[:, :, 2] - blocks[:, :, 1]).sum(axis=1)
    longest = np.argsort(-lives, kind="stable")[:_CANDIDATES]
    soonest = np.argsort(blocks[:, 0, 3], kind="stable")[:_CANDIDATES]
    return blocks[np.union1d(longest, soonest)]


@lru_cache(maxsize=16)
def _family(ranks: int) -> tuple[Ints, Ints]:
    """Return all blocks for a number of ranks, and how many activations their plain repetitions hold."""
    steps = np.array(list(product(range(1, _SLOWEST + 1), repeat=4)), np.int32)
    turns = np.array([turn for turn in product(range(1, 6), repeat=3) if len(set(turn)) == 3], np.int32)
    if ranks == 1:
        steps = steps[:1]  # no pass goes anywhere
    stride = -(-ranks // _CHANGES)
    blocks, held, _ = jit(enumerate_blocks)(ranks, steps, turns, stride, 1, 2 * ranks, _MOST_BLOCKS)
    return blocks, held
