"""Finds the longest path to every node of an event graph, or which nodes cannot be reached.

The algorithm exists twice. The compiled one processes ten million edges per second, but loading the compiler takes half
a second; the interpreted one is for work that takes less than that.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.graph.jit import jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    AnyInts = NDArray[np.signedinteger[Any]]

#: The total number of interpreted edges after which the compiler is loaded: they take as long as loading it. So the
#: total time is never more than twice that of the better choice.
WORTH_LOADING: Final = 200_000
#: The number of edges above which calling the compiled walk pays off, once the compiler is loaded.
WORTH_CALLING: Final = 200

_interpreted_work = [0]

#: The start of a node on a cycle, or after one.
UNREACHED: Final = -1


def longest_path(nodes: int, source: AnyInts, target: AnyInts, weight: AnyInts) -> Ints:
    """Return the earliest start of every node if a target starts no sooner than its source plus the edge's weight.

    Nodes on a cycle, or after one, are ``UNREACHED``. O(nodes + edges).
    """
    if not should_compile(len(source)):
        return np.array(_interpreted(nodes, source, target, weight), np.int64)
    result: Ints = jit(_compiled)(nodes, np.asarray(source, np.int32), np.asarray(target, np.int32), weight)
    return result


def should_compile(work: int) -> bool:
    """Return whether to compile a kernel for this amount of work, in edges."""
    if "numba" in sys.modules:
        return work >= WORTH_CALLING
    _interpreted_work[0] += work
    return _interpreted_work[0] >= WORTH_LOADING


def _interpreted(nodes: int, source: AnyInts, target: AnyInts, weight: AnyInts) -> list[int]:
    after: list[list[int]] = [[] for _ in range(nodes)]
    for edge, node in enumerate(source.tolist()):
        after[node].append(edge)
    targets, weights = target.tolist(), weight.tolist()
    awaited = np.bincount(target, minlength=nodes)
    ready, missing = (awaited == 0).nonzero()[0].tolist(), awaited.tolist()
    start = [0] * nodes
    for node in ready:  # grows while it is walked
        begin = start[node]
        for edge in after[node]:
            other, when = targets[edge], begin + weights[edge]
            if when > start[other]:
                start[other] = when
            left = missing[other] = missing[other] - 1
            if not left:
                ready.append(other)
    return [UNREACHED if left else begin for left, begin in zip(missing, start, strict=True)]


def _compiled(nodes: int, source: AnyInts, target: AnyInts, weight: AnyInts) -> Ints:  # noqa: C901 - one pass, compiled
    edges = len(source)
    first = np.zeros(nodes + 1, np.int32)
    missing = np.zeros(nodes, np.int32)
    for edge in range(edges):
        first[source[edge] + 1] += 1
        missing[target[edge]] += 1
    for node in range(nodes):
        first[node + 1] += first[node]
    # The successors of each node next to each other, so that the walk reads them sequentially.
    after = np.empty(edges, np.int32)
    length = np.empty(edges, weight.dtype)
    fill = first[:-1].copy()
    for edge in range(edges):
        slot = fill[source[edge]]
        fill[source[edge]] = slot + 1
        after[slot] = target[edge]
        length[slot] = weight[edge]
    start = np.zeros(nodes, np.int64)
    ready = np.empty(nodes, np.int32)
    end = 0
    for node in range(nodes):
        if missing[node] == 0:
            ready[end] = node
            end += 1
    # Last in, first out, and of several successors the first one first. That one is the next action of the rank, so the
    # walk stays on a rank as long as it can, and its data stays in the caches.
    while end > 0:
        end -= 1
        node = ready[end]
        begin = start[node]
        for slot in range(first[node + 1] - 1, first[node] - 1, -1):
            other = after[slot]
            if begin + length[slot] > start[other]:
                start[other] = begin + length[slot]
            missing[other] -= 1
            if missing[other] == 0:
                ready[end] = other
                end += 1
    for node in range(nodes):
        if missing[node] > 0:
            start[node] = UNREACHED
    return start
