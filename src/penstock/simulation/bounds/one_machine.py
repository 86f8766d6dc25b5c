"""Computes how long a rank needs for operations with heads and tails if it may interrupt them: Jackson's rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.jit import jit
from penstock.graph.longest_path import should_compile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


def preemptive_ends(taken: Floats, heads: Floats, tails: Floats, members: Ints, first: Ints) -> Floats:
    """Return for every rank when its operations can have run and their tails passed, at the earliest.

    At any time the rank runs, of the operations whose head has passed, the one with the longest tail. No order has an
    earlier end, even with interruptions. Operations without a head or without a tail (-inf) are left out.

    Args:
        taken: how long each operation takes.
        heads: when it can start, for each microbatch in ascending order.
        tails: how much time must pass after its end, for each microbatch in descending order.
        members: the operations, rank by rank.
        first: where those of each rank begin.
    """
    run = jit(_run) if should_compile(heads.size * 10) else _run
    ends: Floats = run(taken, heads, tails, members, first)
    return ends


def _run(taken: Floats, heads: Floats, tails: Floats, members: Ints, first: Ints) -> Floats:  # noqa: C901 - compiled
    microbatches = heads.shape[1]
    ends = np.full(len(first) - 1, -np.inf)
    for rank in range(len(first) - 1):
        here = members[first[rank] : first[rank + 1]]
        following = np.zeros(len(here), np.int64)
        left = np.zeros(len(here), np.float64)
        for index in range(len(here)):
            left[index] = taken[here[index]]
            while following[index] < microbatches and heads[here[index], following[index]] == -np.inf:
                following[index] += 1
        now = -np.inf
        while True:
            best, until = -1, np.inf
            for index in range(len(here)):
                microbatch = following[index]
                if microbatch == microbatches or tails[here[index], microbatch] == -np.inf:
                    continue
                if heads[here[index], microbatch] > now:
                    until = min(until, heads[here[index], microbatch])
                elif best < 0 or tails[here[index], microbatch] > tails[here[best], following[best]]:
                    best = index
            if best < 0:
                if until == np.inf:
                    break
                now = until
            elif now + left[best] <= until:
                now += left[best]
                ends[rank] = max(ends[rank], now + tails[here[best], following[best]])
                following[best] += 1
                left[best] = taken[here[best]]
            else:
                left[best] -= until - now
                now = until
    return ends
