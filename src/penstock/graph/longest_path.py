"""The walk through an event graph: the longest path to every node, or which nodes no walk can reach.

One algorithm in two forms. The compiled one does ten million edges a second, but loading the compiler takes half a
second; the plain one is for what is done in that time.
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

#: Edges that are walked plainly, in all, before the compiler is loaded: as long as that takes. Whatever comes after, no
#: more than twice the time that the better choice would have taken is spent.
WORTH_LOADING: Final = 200_000
#: From so many edges on the compiled walk pays, once it is there.
WORTH_CALLING: Final = 200

_interpreted_work = [0]

#: The start of a node that waits for itself.
UNREACHED: Final = -1


def longest_path(nodes: int, source: AnyInts, target: AnyInts, weight: AnyInts) -> Ints:
    """The earliest start of every node if a target starts no sooner than its source plus the weight of the edge.

    Nodes on a cycle, or behind one, are ``UNREACHED``. O(nodes + edges).
    """
    if not should_compile(len(source)):
        return np.array(_interpreted(nodes, source, target, weight), np.int64)
    result: Ints = jit(_compiled)(nodes, np.asarray(source, np.int32), np.asarray(target, np.int32), weight)
    return result


def should_compile(work: int) -> bool:
    """Whether a kernel with so many steps of work should be run compiled."""
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


def _compiled(nodes: int, source: AnyInts, target: AnyInts, weight: AnyInts) -> Ints:  # noqa: C901 - one pass, to be compiled
    edges = len(source)
    first = np.zeros(nodes + 1, np.int32)
    missing = np.zeros(nodes, np.int32)
    for edge in range(edges):
        first[source[edge] + 1] += 1
        missing[target[edge]] += 1
    for node in range(nodes):
        first[node + 1] += first[node]
    # What comes after each node, side by side: the walk then reads it in one go.
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
    # What became ready last comes next, and of that the end of the first edge. Where that is the next action of a rank,
    # the walk stays on the rank as long as it can, and what it reads in the caches.
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
