"""Computes how early each operation of a relaxation can start, from the waits and from what its rank runs before it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.jit import jit
from penstock.graph.longest_path import should_compile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.bounds.relaxation import Relaxation

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


def path_heads(relaxed: Relaxation, release: Floats) -> Floats:
    """Return the earliest start of each operation for each microbatch by the waits alone.

    Args:
        relaxed: the operations.
        release: when each operation can start at the earliest for each microbatch; -inf for no restriction.
    """
    heads = release.copy()
    _follow_waits(relaxed, heads)
    return heads


def machine_heads(relaxed: Relaxation, release: Floats, rounds: int, rank: int | None = None) -> Floats:
    """Return the earliest starts, considering also that a rank runs one operation at a time.

    An operation starts after everything that must precede it on its rank. For any of these, the rank needs their total
    time from the earliest head among them. The sets grow with the microbatch, so a tree over all operations of the
    rank, sorted by head, gives the best choice in O(log n) for each that joins: O(s^2 m log(s m)) per rank with s
    operations.

    Args:
        relaxed: the operations.
        release: as for ``path_heads``.
        rounds: how often to do this; what one rank gains, others may gain from in the next round.
        rank: the only rank to do it for; by default all.
    """
    heads = path_heads(relaxed, release)
    members, first = relaxed.members if rank is None else relaxed.members_of(rank)
    work = heads.size * int(np.diff(first).max(initial=0)) * 10
    raise_heads = jit(_raise_heads) if should_compile(work) else _raise_heads
    for _ in range(rounds):
        before = heads.copy()
        rest = (relaxed.before, relaxed.forced, relaxed.takes > 0)
        if not raise_heads(heads, before, relaxed.taken, members, first, _order_by_head(before, members, first), *rest):
            break
        _follow_waits(relaxed, heads)
    return heads


def _order_by_head(heads: Floats, members: Ints, first: Ints) -> Ints:
    """Sort the operations of each rank by their heads; not in the kernel, because compiling a sort takes long."""
    ranks = pairwise(first)
    return np.concatenate([np.argsort(heads[members[begin:end]], axis=None, kind="stable") for begin, end in ranks])


def _follow_waits(relaxed: Relaxation, heads: Floats) -> None:
    follow = jit(_follow) if should_compile(heads.size * 4) else _follow
    follow(heads, relaxed.order, *relaxed.waits)


def _follow(heads: Floats, order: Ints, first: Ints, source: Ints, shift: Ints, lag: Floats) -> None:
    for microbatch in range(heads.shape[1]):
        for operation in order:
            latest = heads[operation, microbatch]
            for entry in range(first[operation], first[operation + 1]):
                other = microbatch + shift[entry]
                if other >= 0:
                    latest = max(latest, heads[source[entry], other] + lag[entry])
            heads[operation, microbatch] = latest


def _raise_heads(  # noqa: C901 - compiled
    heads: Floats,
    known: Floats,
    taken: Floats,
    members: Ints,
    first: Ints,
    by_head: Ints,
    before: Ints,
    forced: Floats,
    is_taking: Bools,
) -> bool:
    microbatches = heads.shape[1]
    is_raised = False
    for rank in range(len(first) - 1):
        here = members[first[rank] : first[rank + 1]]
        count = len(here) * microbatches
        ordered = np.empty(count, np.float64)
        place = np.empty(count, np.int64)
        for index in range(count):
            entry = by_head[first[rank] * microbatches + index]
            ordered[index] = known[here[entry // microbatches], entry % microbatches]
            place[entry] = index
        leaves = 1
        while leaves < count:
            leaves *= 2
        total = np.empty(2 * leaves, np.float64)  # how long the joined operations below a node take
        end = np.empty(2 * leaves, np.float64)  # when they can have run
        for target in here:
            total[:] = 0.0
            end[:] = -np.inf
            joined = np.zeros(len(here), np.int64)
            for microbatch in range(microbatches):
                for index in range(len(here)):
                    other = here[index]
                    upto = min(microbatch + before[target, other] + 1, microbatches)
                    while joined[index] < upto:
                        head = known[other, joined[index]]
                        node = leaves + place[index * microbatches + joined[index]]
                        joined[index] += 1
                        if taken[other] == 0.0 or head == -np.inf:
                            continue
                        total[node] = taken[other]
                        end[node] = head + taken[other]
                        node //= 2
                        while node:
                            total[node] = total[2 * node] + total[2 * node + 1]
                            end[node] = max(end[2 * node] + total[2 * node + 1], end[2 * node + 1])
                            node //= 2
                finish = end[1]
                if forced[target, microbatch] > 0.0:
                    # What is forced begins with the operation of the least head among those that have not joined.
                    earliest = count
                    for index in range(len(here)):
                        if not is_taking[here[index]] and joined[index] < microbatches:
                            earliest = min(earliest, place[index * microbatches + joined[index]])
                    if earliest < count:
                        node = leaves + earliest
                        later = total[node]
                        while node > 1:
                            if node % 2 == 0:
                                later += total[node + 1]
                            node //= 2
                        latest = ordered[earliest] + later
                        node = leaves + earliest
                        while node > 1:
                            if node % 2 == 1:
                                latest = max(latest, end[node - 1] + later)
                                later += total[node - 1]
                            node //= 2
                        finish = max(finish, latest + forced[target, microbatch])
                if finish > -np.inf and finish - 1e-9 * abs(finish) > heads[target, microbatch]:
                    heads[target, microbatch] = finish
                    is_raised = True
    return is_raised
