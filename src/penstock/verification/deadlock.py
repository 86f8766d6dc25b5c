"""No rank waits for ever: the event graph has no cycle. If it has one, the cycle is the explanation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.graph.action_table import ActionTable
from penstock.graph.events import REASONS, event_graph, rank_ranges
from penstock.graph.longest_path import UNREACHED, longest_path
from penstock.graph.wait_chain import MAX_LINKS, WaitingRank, describe_wait_chain
from penstock.ir import packed
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.verification.findings import Finding, Problem, action_at, rank_and_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.comm_model import CommModel
    from penstock.graph.events import EventGraph, RankRange
    from penstock.ir.schedule import Schedule

    Ints = NDArray[np.signedinteger[Any]]


class Wait(NamedTuple):
    """One link of a cycle: places in the leaves, of what waits and of what it waits for, and why."""

    waiting: int
    awaited: int
    reason: str


def is_deadlock_free(actions: ActionTable, model: CommModel) -> bool:
    """Whether the schedule runs to its end under this model, as far as waiting goes. O(n log n)."""
    return not (_starts(event_graph(actions, model)) == UNREACHED).any()


def without_transfers(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives: if it waits in a circle, no order of transfers can help."""
    kept = ~np.isin(packed.types(schedule.codes), [packed.TYPE_NUMBER[kind] for kind in TRANSFER_TYPES])
    return schedule.with_codes(schedule.codes[kept], np.append(0, np.cumsum(kept))[schedule.offsets])


def check_deadlock(
    actions: ActionTable, model: CommModel, turns: Ints | None = None, *, only_problem: bool = True
) -> Iterator[Problem]:
    """The cycle that a deadlock is made of.

    Whoever made the schedule may hand over ``turns``, one per action. If everything that is waited for has an earlier
    turn than what waits, there is no cycle, and no need to walk. ``only_problem`` says that nothing else is wrong.
    """
    if turns is not None and all(_all_wait_for_earlier(part, model, turns) for part in rank_ranges(actions)):
        return
    graph = event_graph(actions, model)
    starts = _starts(graph)
    if (starts != UNREACHED).all():
        return
    cycle = _BlockedGraph(graph, starts).cycle()
    yield Problem(
        "deadlock", np.zeros(1, np.int64), lambda _: _describe_cycle(actions, cycle, model, only_problem=only_problem)
    )


def _all_wait_for_earlier(part: RankRange, model: CommModel, turns: Ints) -> bool:
    within, cell = turns[part.begin : part.end], part.actions.cell[part.begin : part.end]
    # What is one event has one turn, else the turns prove nothing.
    if ((cell[1:] == cell[:-1]) & (within[1:] != within[:-1])).any():
        return False
    if model.capacity == 0 and (turns[part.operation] != turns[part.partner]).any():
        return False
    for reason, awaited, waiting in part.edges(model):
        # A receive may have the turn of its send: no circle is made of messages alone.
        if (turns[awaited] + (reason != "message") > turns[waiting]).any():
            return False
    return True


def _starts(graph: EventGraph) -> Ints:
    return longest_path(len(graph.node), graph.source, graph.target, np.ones(len(graph.awaited), np.int8))


class _BlockedGraph:
    """The part of a graph that no walk reached: every node in it waits for another one in it.

    A rank stands at its first action that was not reached, and a lane at its first operation; whatever comes later on
    the rank or in the lane waits for those. So a walk from one such head to the next goes round within as many links as
    there are heads, however long the rows are.
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
        """A cycle of heads: each waits for the next, the last for the first."""
        node = int(self.target[0])
        seen: dict[int, int] = {}
        path: list[Wait] = []
        while node not in seen:
            seen[node] = len(path)
            path.append(self._wait(node))
            node = int(self.node[path[-1].awaited])
        return path[seen[node] :]

    def _wait(self, node: int) -> Wait:
        """What a node waits for: what its rank has to do first, else what is ahead in its lane, else what it needs."""
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


#: Which reason explains a wait best, if there are several.
_BY_REASON: Final = {
    reason: number for number, reason in enumerate(("post", "program", "lane", "room", "message", "use", "data"))
}


def _describe_cycle(actions: ActionTable, cycle: list[Wait], model: CommModel, *, only_problem: bool) -> Finding:
    """In words: per rank where it is stuck, and what it would do for the rank before if it were not."""
    stays = _waiting_ranks(actions, cycle)
    links = [
        WaitingRank(
            int(actions.rank[stuck]),
            str(action_at(actions, stuck)),
            None if wanted == stuck else str(action_at(actions, wanted)),
            reason == "room",
        )
        for stuck, wanted, reason in stays
    ]
    message = describe_wait_chain(links, f"rank {links[0].rank}")
    rank, step = rank_and_step(actions, stays[0][0])
    marks = tuple(
        dict.fromkeys(rank_and_step(actions, position) for stay in stays[:MAX_LINKS] for position in stay[:2])
    )
    return Finding(
        "deadlock",
        rank,
        step,
        action_at(actions, stays[0][0]),
        f"{message} (under {model})",
        _advice(actions, model, only_problem=only_problem),
        marks,
    )


def _advice(actions: ActionTable, model: CommModel, *, only_problem: bool) -> str:
    """What to do about a deadlock: moving transfers helps unless the compute actions alone wait in a circle."""
    if not actions.has_transfers:
        return "reorder these: no order of transfers can help"
    if not only_problem:
        return "mend what else is wrong first, and check again"
    compute = ActionTable(without_transfers(actions.schedule))
    graph = event_graph(compute, model)
    starts = _starts(graph)
    if (starts == UNREACHED).any():
        stays = _waiting_ranks(compute, _BlockedGraph(graph, starts).cycle())[:MAX_LINKS]
        stuck = ", ".join(
            f"{action_at(compute, position)} on rank {compute.rank[position]}" for position, _, _ in stays
        )
        return f"reorder the compute actions ({stuck}): no order of transfers can help"
    return "reorder: penstock.repair(schedule, model), or penstock convert --repair, can move communication"


def _waiting_ranks(actions: ActionTable, cycle: list[Wait]) -> list[tuple[int, int, str]]:
    """For each rank on the way round: where it is stuck, what the rank before waits for it to do, and why it waits."""
    ranks = [int(actions.rank[wait.waiting]) for wait in cycle]
    changes = [number for number in range(len(cycle)) if ranks[number] != ranks[number - 1]] or [0]
    start = min(changes, key=lambda number: ranks[number])
    turned = cycle[start:] + cycle[:start]
    stays: list[tuple[int, int, str]] = []
    for number, wait in enumerate(turned):
        # What comes later, on the rank or in a lane, is not where it is stuck: the one at the head is.
        stuck = wait.awaited if wait.reason in ("program", "post", "lane") else wait.waiting
        if number == 0 or actions.rank[wait.waiting] != actions.rank[turned[number - 1].waiting]:
            stays.append((stuck, wait.waiting, wait.reason))
        else:
            stays[-1] = (stuck, stays[-1][1], wait.reason)
    return stays
