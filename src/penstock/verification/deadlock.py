"""No rank waits for ever: the event graph has no cycle. If it has one, the cycle is the explanation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.graph.events import event_graph
from penstock.graph.walk import UNREACHED, longest_path
from penstock.verification.findings import Finding, Problem, action_at, position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.events import EventGraph
    from penstock.graph.leaves import Leaves
    from penstock.graph.models import CommModel


class Wait(NamedTuple):
    """One link of a cycle: places in the leaves, of what waits and of what it waits for."""

    waiting: int
    awaited: int


def is_free(leaves: Leaves, model: CommModel) -> bool:
    """Whether the schedule runs to its end under this model, as far as waiting goes. O(n log n)."""
    return not (_starts(event_graph(leaves, model)) == UNREACHED).any()


def deadlocked(leaves: Leaves, model: CommModel) -> Iterator[Problem]:
    """The cycle that a deadlock is made of."""
    graph = event_graph(leaves, model)
    starts = _starts(graph)
    if (starts != UNREACHED).all():
        return
    cycle = find_cycle(graph, starts)
    yield Problem("deadlock", np.zeros(1, np.int64), lambda _: _told(leaves, cycle, model))


def _starts(graph: EventGraph) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return longest_path(len(graph.node), graph.source, graph.target, np.ones(len(graph.awaited), np.int64))


def find_cycle(graph: EventGraph, starts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Wait]:
    """A cycle among the nodes that no walk reached: each waits for the next, the last for the first."""
    source, target = graph.source, graph.target
    stuck = np.flatnonzero((starts[source] == UNREACHED) & (starts[target] == UNREACHED))
    # Every node that was not reached has an edge from another such; follow one of them until a node comes again.
    blocker = dict(zip(target[stuck].tolist(), stuck.tolist(), strict=True))
    node = int(target[stuck[0]])
    seen: dict[int, int] = {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(blocker[node])
        node = int(source[blocker[node]])
    return [Wait(int(graph.waiting[edge]), int(graph.awaited[edge])) for edge in path[seen[node] :]]


def _told(leaves: Leaves, cycle: list[Wait], model: CommModel) -> Finding:
    """In words: per rank where it is stuck, and what it would do for the rank before if it were not."""
    stays = _stays(leaves, cycle)
    links = []
    for number, (stuck, wanted) in enumerate(stays):
        rank, action = int(leaves.rank[stuck]), action_at(leaves, stuck)
        behind = "" if wanted == stuck else f", ahead of {action_at(leaves, wanted)},"
        who = f"rank {rank} waits" if number == 0 else f"rank {rank}, which waits"
        links.append(f"{who} in {action}{behind} for ")
    message = "".join(links) + f"rank {leaves.rank[stays[0][0]]}"
    rank, step = position(leaves, stays[0][0])
    marks = tuple(dict.fromkeys(position(leaves, place) for stay in stays for place in stay))
    return Finding(
        "deadlock",
        rank,
        step,
        action_at(leaves, stays[0][0]),
        f"{message} (under {model})",
        "reorder: penstock.repair can move communication",
        marks,
    )


def _stays(leaves: Leaves, cycle: list[Wait]) -> list[tuple[int, int]]:
    """For each rank on the way round: where it is stuck, and what the rank before waits for it to do."""
    ranks = [int(leaves.rank[wait.waiting]) for wait in cycle]
    changes = [number for number in range(len(cycle)) if ranks[number] != ranks[number - 1]] or [0]
    start = min(changes, key=lambda number: ranks[number])
    turned = cycle[start:] + cycle[:start]
    stays: list[tuple[int, int]] = []
    for number, wait in enumerate(turned):
        # An operation in line behind another is not where the rank is stuck: the one at the head is.
        same_rank = leaves.rank[wait.awaited] == leaves.rank[wait.waiting]
        stuck = wait.awaited if same_rank else wait.waiting
        if number == 0 or leaves.rank[wait.waiting] != leaves.rank[turned[number - 1].waiting]:
            stays.append((stuck, wait.waiting))
        else:
            stays[-1] = (stuck, stays[-1][1])
    return stays
