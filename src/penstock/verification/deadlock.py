"""Checks that no rank waits forever: the event graph has no cycle. If it has one, the cycle explains the deadlock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.graph.action_table import ActionTable
from penstock.graph.events import REASONS, event_graph
from penstock.graph.longest_path import UNREACHED, longest_path
from penstock.graph.wait_chain import MAX_LINKS, WaitingRank, describe_wait_chain
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.verification.findings import Finding, Problem, action_at, rank_and_step
from penstock.verification.turns import prove_deadlock_free

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.comm_model import CommModel
    from penstock.graph.events import EventGraph
    from penstock.ir.schedule import Schedule

    Ints = NDArray[np.signedinteger[Any]]


class Wait(NamedTuple):
    """One link of a cycle: the positions of a waiting action and of what it waits for, and the reason."""

    waiting: int
    awaited: int
    reason: str


def is_deadlock_free(actions: ActionTable, model: CommModel) -> bool:
    """Return whether the schedule is free of deadlock under this model. O(n log n)."""
    return not (_starts(event_graph(actions, model)) == UNREACHED).any()


def without_transfers(schedule: Schedule) -> Schedule:
    """Drop the sends and receives; if the rest deadlocks, no order of transfers can help."""
    kept = ~np.isin(packed.types(schedule.codes), [packed.TYPE_NUMBER[kind] for kind in TRANSFER_TYPES])
    return schedule.with_codes(schedule.codes[kept], np.append(0, np.cumsum(kept))[schedule.offsets])


def check_deadlock(
    actions: ActionTable, model: CommModel, turns: Ints | None = None, *, only_problem: bool = True
) -> Iterator[Problem]:
    """Find a deadlock, and the cycle that explains it.

    The creator of the schedule may pass ``turns``, one per action, which spare the walk through the graph if they prove
    that there is no cycle. ``only_problem`` says that nothing else is wrong with the schedule.
    """
    if turns is not None and prove_deadlock_free(actions, model, turns):
        return
    graph = event_graph(actions, model)
    starts = _starts(graph)
    if (starts != UNREACHED).all():
        return
    cycle = _BlockedGraph(graph, starts).cycle()
    yield Problem(
        "deadlock", np.zeros(1, np.int64), lambda _: _describe_cycle(actions, cycle, model, only_problem=only_problem)
    )


def _starts(graph: EventGraph) -> Ints:
    return longest_path(len(graph.node), graph.source, graph.target, np.ones(len(graph.awaited), np.int8))


class _BlockedGraph:
    """The unreached part of a graph, in which every node waits for another one.

    A rank is blocked at its first unreached action, and a lane at its first unreached operation; everything later on
    the rank or in the lane waits for these. So a walk from one such head to the next closes a cycle within as many
    links as there are heads, however long the rows are.
    """

    def __init__(self, graph: EventGraph, starts: Ints) -> None:
        self.actions = graph.actions
        source, target = graph.source, graph.target
        edges = np.flatnonzero((starts[source] == UNREACHED) & (starts[target] == UNREACHED))
        edges = edges[np.argsort(target[edges], kind="stable")]
        self.target = target[edges]
        self.source = source[edges]
        self.awaited, self.waiting = graph.awaited[edges], graph.waiting[edges]
        self.reason = graph.reason[edges]
        self.node = graph.node[graph.actions.cell]
        operations = np.zeros(len(graph.actions), bool)
        operations[graph.actions.positions_of(*TRANSFER_TYPES)] = True
        standing = np.flatnonzero(~operations & (starts[self.node] == UNREACHED))
        ranks, first = np.unique(self.actions.rank[standing], return_index=True)
        self.head_of_rank = dict(zip(ranks.tolist(), standing[first].tolist(), strict=True))

    def cycle(self) -> list[Wait]:
        """Return a cycle of heads: each waits for the next, and the last for the first."""
        node = int(self.target[0])
        seen: dict[int, int] = {}
        path: list[Wait] = []
        while node not in seen:
            seen[node] = len(path)
            path.append(self._wait(node))
            node = int(self.node[path[-1].awaited])
        return path[seen[node] :]

    def _wait(self, node: int) -> Wait:
        """Return what a node waits for: an earlier action of its rank, else one ahead in its lane, else its input."""
        start, end = np.searchsorted(self.target, [node, node + 1])
        edge = min(range(start, end), key=lambda number: _BY_REASON[REASONS[self.reason[number]]])
        waiting, awaited, reason = int(self.waiting[edge]), int(self.awaited[edge]), REASONS[self.reason[edge]]
        if reason in ("program", "post"):
            return Wait(waiting, self.head_of_rank[int(self.actions.rank[awaited])], reason)
        if reason == "lane":
            return Wait(waiting, self._head_of_lane(awaited), reason)
        return Wait(waiting, awaited, reason)

    def _head_of_lane(self, operation: int) -> int:
        while True:
            start, end = np.searchsorted(self.target, [self.node[operation], self.node[operation] + 1])
            ahead = [
                int(self.awaited[edge])
                for edge in range(start, end)
                if self.waiting[edge] == operation and REASONS[self.reason[edge]] == "lane"
            ]
            if not ahead:
                return operation
            operation = ahead[0]


#: If there are several reasons for a wait, the one that explains it best comes first.
_BY_REASON: Final = {
    reason: number for number, reason in enumerate(("post", "program", "lane", "room", "message", "use", "data"))
}


def _describe_cycle(actions: ActionTable, cycle: list[Wait], model: CommModel, *, only_problem: bool) -> Finding:
    """Describe the cycle: for each rank where it is blocked, and what the previous rank waits for it to do."""
    blocked = _waiting_ranks(actions, cycle)
    links = [
        WaitingRank(
            int(actions.rank[stuck]),
            str(action_at(actions, stuck)),
            None if wanted == stuck else str(action_at(actions, wanted)),
            reason == "room",
        )
        for stuck, wanted, reason in blocked
    ]
    message = describe_wait_chain(links, f"rank {links[0].rank}")
    rank, step = rank_and_step(actions, blocked[0][0])
    marks = tuple(
        dict.fromkeys(rank_and_step(actions, position) for each in blocked[:MAX_LINKS] for position in each[:2])
    )
    return Finding(
        "deadlock",
        rank,
        step,
        action_at(actions, blocked[0][0]),
        f"{message} (under {model})",
        _advice(actions, model, only_problem=only_problem),
        marks,
    )


def _advice(actions: ActionTable, model: CommModel, *, only_problem: bool) -> str:
    """Suggest a fix: moving transfers helps unless the compute actions alone deadlock."""
    if not actions.has_transfers:
        return "reorder these actions: no order of transfers can help"
    if not only_problem:
        return "fix the other findings first, then check again"
    compute = ActionTable(without_transfers(actions.schedule))
    graph = event_graph(compute, model)
    starts = _starts(graph)
    if (starts == UNREACHED).any():
        blocked = _waiting_ranks(compute, _BlockedGraph(graph, starts).cycle())[:MAX_LINKS]
        stuck = ", ".join(
            f"{action_at(compute, position)} on rank {compute.rank[position]}" for position, _, _ in blocked
        )
        return f"reorder the compute actions ({stuck}): no order of transfers can help"
    return "reorder the transfers, e.g. with penstock.repair(schedule, model) or penstock convert --repair"


def _waiting_ranks(actions: ActionTable, cycle: list[Wait]) -> list[tuple[int, int, str]]:
    """Return for each rank of the cycle where it is blocked, what the previous rank waits for, and why it waits."""
    ranks = [int(actions.rank[wait.waiting]) for wait in cycle]
    changes = [number for number in range(len(cycle)) if ranks[number] != ranks[number - 1]] or [0]
    start = min(changes, key=lambda number: ranks[number])
    turned = cycle[start:] + cycle[:start]
    blocked: list[tuple[int, int, str]] = []
    for number, wait in enumerate(turned):
        # The rank is blocked at the head, not at what comes later on the rank or in the lane.
        stuck = wait.awaited if wait.reason in ("program", "post", "lane") else wait.waiting
        if number == 0 or actions.rank[wait.waiting] != actions.rank[turned[number - 1].waiting]:
            blocked.append((stuck, wait.waiting, wait.reason))
        else:
            blocked[-1] = (stuck, blocked[-1][1], wait.reason)
    return blocked
