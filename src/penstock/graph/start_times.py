"""Computes when everything in an event graph starts: sorts it once, then walks it for any number of durations.

As in ``longest_path.py``, every kernel exists twice, interpreted and compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.graph.jit import jit
from penstock.graph.longest_path import should_compile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]
    AnyInts = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: The critical edge of a node that waited for nothing.
NOTHING: Final = -1


@dataclass(frozen=True, slots=True)
class Order:
    """The nodes of a graph in topological order, and the edges into each node next to each other.

    Attributes:
        nodes: the nodes in order.
        first: for each index in ``nodes``, where its edges begin in the next two arrays, and finally where they end.
        source: the node that each edge comes from.
        edge: the original index of each edge.
    """

    nodes: Ints
    first: Ints
    source: Ints
    edge: Ints


def topological_order(nodes: int, source: AnyInts, target: AnyInts) -> Order | None:
    """Sort a graph; return None if it has a cycle. O(nodes + edges)."""
    sort = jit(_sort) if should_compile(len(source)) else _sort_interpreted
    reached, *arrays = sort(nodes, np.asarray(source, np.int32), np.asarray(target, np.int32))
    return Order(*arrays) if reached == nodes else None


def start_times(order: Order, duration: Floats, delay: Floats, release: Floats) -> tuple[Floats, Ints]:
    """Return the earliest start of each node, and its critical edge: the one that it waited for longest.

    A node starts once every source has ended and the delay of the edge has passed, but not before its own release.
    Of several edges that end at the same time, the first one counts. O(nodes + edges).
    """
    walk = jit(_walk) if should_compile(len(order.source)) else _walk_interpreted
    start, critical = walk(order.nodes, order.first, order.source, order.edge, duration, delay, release)
    return start, critical


def critical_edges(order: Order, start: Floats, duration: Floats, delay: Floats, release: Floats) -> Ints:
    """Return the critical edge of each node, given when all of them start: of a measured run, or one that is read.

    The same edges as those of ``start_times`` if the nodes start as soon as they can. O(n log n).
    """
    target = np.repeat(order.nodes, np.diff(order.first))
    when = start[order.source] + duration[order.source] + delay[order.edge]
    ranked = np.lexsort((-order.edge.astype(np.int64), when, target))
    target, edge, when = target[ranked], order.edge[ranked], when[ranked]
    last = np.flatnonzero(np.append(target[1:] != target[:-1], True)) if len(target) else np.empty(0, np.int64)
    last = last[(when[last] >= release[target[last]]) & (when[last] > -np.inf)]
    critical = np.full(len(start), NOTHING, np.int32)
    critical[target[last]] = edge[last]
    return critical


def _sort(nodes: int, source: Ints, target: Ints) -> tuple[int, Ints, Ints, Ints, Ints]:  # noqa: C901 - compiled
    edges = len(source)
    after_first = np.zeros(nodes + 1, np.int32)
    missing = np.zeros(nodes, np.int32)
    for edge in range(edges):
        after_first[source[edge] + 1] += 1
        missing[target[edge]] += 1
    count = missing.copy()
    for node in range(nodes):
        after_first[node + 1] += after_first[node]
    after = np.empty(edges, np.int32)
    fill = after_first[:-1].copy()
    for edge in range(edges):
        after[fill[source[edge]]] = target[edge]
        fill[source[edge]] += 1
    order = np.empty(nodes, np.int32)
    end = 0
    for node in range(nodes):
        if missing[node] == 0:
            order[end] = node
            end += 1
    begin = 0
    while begin < end:
        node = order[begin]
        begin += 1
        for slot in range(after_first[node], after_first[node + 1]):
            missing[after[slot]] -= 1
            if missing[after[slot]] == 0:
                order[end] = after[slot]
                end += 1
    first = np.zeros(nodes + 1, np.int32)
    slot_of = np.zeros(nodes, np.int32)
    for position in range(end):
        slot_of[order[position]] = first[position]
        first[position + 1] = first[position] + count[order[position]]
    by_target = np.empty(edges, np.int32)
    number = np.empty(edges, np.int32)
    if end == nodes:
        for edge in range(edges):
            slot = slot_of[target[edge]]
            slot_of[target[edge]] += 1
            by_target[slot] = source[edge]
            number[slot] = edge
    return end, order, first, by_target, number


def _sort_interpreted(nodes: int, source: Ints, target: Ints) -> tuple[int, Ints, Ints, Ints, Ints]:
    """Do the same with lists, which are faster than arrays in interpreted code."""
    after: list[list[int]] = [[] for _ in range(nodes)]
    for node, other in zip(source.tolist(), target.tolist(), strict=True):
        after[node].append(other)
    count = np.bincount(target, minlength=nodes)
    order, missing = np.flatnonzero(count == 0).tolist(), count.tolist()
    for node in order:  # grows while it is walked
        for other in after[node]:
            left = missing[other] = missing[other] - 1
            if not left:
                order.append(other)
    position = np.zeros(nodes, np.int64)
    position[order] = np.arange(len(order))
    edge = np.argsort(position[target], kind="stable").astype(np.int32)
    nodes_in_order = np.array(order, np.int32)
    first = np.append(0, np.cumsum(count[nodes_in_order])).astype(np.int32)
    return len(order), nodes_in_order, first, source[edge], edge


def _walk(
    nodes: Ints, first: Ints, source: Ints, edge: Ints, duration: Floats, delay: Floats, release: Floats
) -> tuple[Floats, Ints]:
    start = release.copy()
    critical = np.full(len(nodes), NOTHING, np.int32)
    for position in range(len(nodes)):
        node = nodes[position]
        latest, which = start[node], NOTHING
        for slot in range(first[position], first[position + 1]):
            when = start[source[slot]] + duration[source[slot]] + delay[edge[slot]]
            if when > latest or (which == NOTHING and when == latest):
                latest, which = when, edge[slot]
        start[node] = latest
        critical[node] = which
    return start, critical


def _walk_interpreted(
    nodes: Ints, first: Ints, source: Ints, edge: Ints, duration: Floats, delay: Floats, release: Floats
) -> tuple[Floats, Ints]:
    """Do the same with lists, which are faster than arrays in interpreted code."""
    start = release.tolist()
    critical = [NOTHING] * len(start)
    bounds, sources, edges = first.tolist(), source.tolist(), edge.tolist()
    lasts, delays = duration.tolist(), delay.tolist()
    for position, node in enumerate(nodes.tolist()):
        latest, which = start[node], NOTHING
        for slot in range(bounds[position], bounds[position + 1]):
            before = sources[slot]
            when = start[before] + lasts[before] + delays[edges[slot]]
            if when > latest or (which == NOTHING and when == latest):
                latest, which = when, edges[slot]
        start[node] = latest
        critical[node] = which
    return np.array(start, np.float64), np.array(critical, np.int32)
