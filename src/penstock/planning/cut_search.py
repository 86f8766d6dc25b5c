"""Finds the best ways to cut layers into stages, by dynamic programming over partial cuts.

The value of a way to cut is the time of the busiest rank, that of the longest stage, the memory of the fullest rank,
and the time in transfer; ``CutProblem.order`` says how values are compared. A partial way is dropped if ``count``
others have cut the same layers and are no worse in anything that matters for the rest: these four, and what is already
on each rank that gets further stages. That is exact for the best ``count`` values.

With one stage per rank, nothing is on the ranks of further stages. In a V with two stages per rank, the same holds if
stages are cut from both ends towards the middle. With more, there can be too many partial ways: beyond a number of
them, only the most promising ones are kept, and the result is no longer exact.

The time of the busiest rank is limited first to a lower bound of the best, and the limit is then raised step by step
until enough ways are found that no way beyond the limit can beat, since a tight limit leaves few ways.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.planning.cut_problem import CutProblem

#: How many ways are compared with all others at once.
_BLOCK: Final = 512

#: How many ways without loads take as long as one with loads, roughly.
_CHEAP: Final = 5

Value: TypeAlias = tuple[int, int, int, int]


class Way(NamedTuple):
    """A way to cut layers into stages, perhaps some of them only.

    Attributes:
        value: the time of the busiest rank, that of the longest stage, the memory of the fullest rank, the time in
            transfer.
        loads: what is on the ranks that get further stages: time, least memory, held memory of one after the other.
        bounds: where its stages begin and end.
    """

    value: Value
    loads: tuple[int, ...]
    bounds: tuple[int, ...]


class Found(NamedTuple):
    """The best ways to cut all layers, the best first, and whether their values are surely the best."""

    solutions: list[Way]
    is_exact: bool


class Reached(NamedTuple):
    """All ways that were found below a limit.

    Attributes:
        ways: the ways.
        is_limited: whether the limit has excluded others.
        is_exact: whether no other was set aside.
    """

    ways: list[Way]
    is_limited: bool
    is_exact: bool


def search(problem: CutProblem, count: int, most_states: int) -> Found:
    """Return the best ways to cut the layers, as many as requested if there are as many."""
    total = problem.time[-1]
    limit = -(-(total + sum(problem.base)) // problem.ranks)
    step = total // 400 + 1
    shortest = _shortest(problem)
    while True:
        if _is_v(problem):
            reached = _cut_from_both_ends(problem, limit, count, most_states)
        else:
            reached = _cut_from_left(problem, limit, count, most_states)
        best = sorted(reached.ways, key=lambda way: (problem.order(way.value), way))[:count]
        beyond = problem.order((limit + 1, shortest, 0, 0))
        if not reached.is_limited or (len(best) == count and problem.order(best[-1].value) <= beyond):
            return Found(best, reached.is_exact)
        limit, step = limit + step, 2 * step


def _shortest(problem: CutProblem) -> int:
    """Return how long the longest stage takes at least."""
    free = replace(problem, base=(0,) * problem.ranks)
    low, high = 0, problem.time[-1]  # a range would not do: these may be longer than 64 bits
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(free, middle)[0] <= problem.stages:
            high = middle
        else:
            low = middle + 1
    return low


def keep_best(ways: Iterable[Way], count: int) -> list[Way]:
    """Drop the ways that ``count`` others are no worse than in anything."""
    ordered = sorted(ways)
    if len(ordered) <= count:
        return ordered
    columns = [_ranked(column) for column in zip(*((*way.value, *way.loads) for way in ordered), strict=True)]
    kept = []
    # Only what comes before a way in this order can be no worse than it. In blocks, so that the matrix stays small.
    for start in range(0, len(ordered), _BLOCK):
        end = min(start + _BLOCK, len(ordered))
        no_worse = np.arange(end)[:, None] < np.arange(start, end)
        for column in columns:
            no_worse &= column[:end, None] <= column[start:end]
        kept += (start + np.flatnonzero(no_worse.sum(axis=0) < count)).tolist()
    return [ordered[place] for place in kept]


def _ranked(column: tuple[int, ...]) -> NDArray[np.int64]:
    """Return numbers in the same order that fit into 64 bits."""
    if max(column) < 1 << 62 and min(column) > -(1 << 62):
        return np.array(column, np.int64)
    places = {value: place for place, value in enumerate(sorted(set(column)))}
    return np.array([places[value] for value in column], np.int64)


def _is_v(problem: CutProblem) -> bool:
    """Return whether the stages of every rank are one from each end."""
    forth = problem.rank_of[: problem.ranks]
    return problem.stages == 2 * problem.ranks == 2 * len(set(forth)) and problem.rank_of == forth + forth[::-1]


def _cut_from_both_ends(problem: CutProblem, limit: int, count: int, most_states: int) -> Reached:
    """Cut a V: the stages of one rank after the other, from both ends to the middle."""
    reached = {(0, problem.layers): [Way((min(problem.base), 0, 0, 0), (), ())]}
    is_limited, is_exact = False, True
    for stage in range(problem.ranks):
        ahead = problem.ranks - stage - 1
        room = sum(limit - problem.base[rank] for rank in problem.rank_of[stage + 1 : problem.ranks])
        following: dict[tuple[int, int], list[Way]] = {}
        for (left, right), ways in reached.items():
            for begin, end, fits in _pairs(problem, stage, left, right, limit):
                if not fits or problem.time[end] - problem.time[begin] > room:
                    is_limited = True
                    continue
                if end - begin < 2 * ahead:
                    continue
                following.setdefault((begin, end), []).extend(
                    _with_pair(problem, way, stage, (left, begin), (end, right)) for way in ways
                )
        reached = {key: keep_best(ways, count) for key, ways in following.items()}
        if sum(map(len, reached.values())) > _CHEAP * most_states:
            reached, is_exact = _smallest(reached, _CHEAP * most_states, lambda _, way: problem.order(way.value)), False
    complete = [way for ways in reached.values() for way in ways]
    return Reached([way._replace(bounds=(0, *way.bounds, problem.layers)) for way in complete], is_limited, is_exact)


def _pairs(problem: CutProblem, stage: int, left: int, right: int, limit: int) -> Iterator[tuple[int, int, bool]]:
    """Yield where the two stages of a rank may end and begin, and whether they stay below the limit of time."""
    rank, other = problem.rank_of[stage], problem.stages - 1 - stage
    innermost = stage == problem.ranks - 1
    most = limit - problem.base[rank]
    for begin in range(left + 1, right):
        first = problem.of_stage(stage, left, begin)
        if first.time > most:
            yield begin, begin, False
            return
        if first.least > problem.limits[rank]:
            return
        for end in (begin,) if innermost else range(right - 1, begin, -1):
            second = problem.of_stage(other, end, right)
            if first.least + second.least > problem.limits[rank]:
                break
            if first.time + second.time > most:
                yield begin, end, False
                break
            if _keeps_together(problem, (left, begin), (end, right)):
                yield begin, end, True


def _keeps_together(problem: CutProblem, *ranges: tuple[int, int]) -> bool:
    """Return whether these layers are all or none of every group."""
    inside = ({any(a <= layer < b for a, b in ranges) for layer in group} for group in problem.together)
    return all(len(each) == 1 for each in inside)


def _with_pair(problem: CutProblem, way: Way, stage: int, left: tuple[int, int], right: tuple[int, int]) -> Way:
    """Add two stages that meet at the innermost rank."""
    first, second = problem.of_stage(stage, *left), problem.of_stage(problem.stages - 1 - stage, *right)
    time, longest, held, transfer = way.value
    if left[1] < right[0]:
        transfer += problem.transfers[left[1]] + problem.transfers[right[0]]
    load = problem.base[problem.rank_of[stage]] + first.time + second.time
    value = (
        max(time, load),
        max(longest, first.time, second.time),
        max(held, first.held + second.held),
        transfer,
    )
    half = len(way.bounds) // 2
    inner = {left[1], right[0]}  # the two meet on the innermost rank
    return Way(value, (), (*way.bounds[:half], *sorted(inner), *way.bounds[half:]))


#: What the ways that are compared with each other have in common.
_AnyKey = TypeVar("_AnyKey", tuple[int, int], "_Key")

#: How many layers are cut off, and on which rank each group of layers is, -1 if none of it is placed.
_Key: TypeAlias = tuple[int, tuple[int, ...]]


def _cut_from_left(problem: CutProblem, limit: int, count: int, most_states: int) -> Reached:
    """Cut stage after stage, from the first layer on."""
    start = Way((min(problem.base), 0, 0, 0), (), (0,))
    reached: dict[_Key, list[Way]] = {(0, (-1,) * len(problem.together)): [start]}
    stages_needed = _stages_needed(problem, limit)
    is_limited, is_exact = False, True
    for stage in range(problem.stages):
        step = _Step(problem, stage, limit, stages_needed)
        following: dict[_Key, list[Way]] = {}
        for (begin, homes), ways in reached.items():
            for way in ways:
                for end, new in step.extend(begin, way):
                    key = step.place(homes, begin, end)
                    if key is not None:
                        following.setdefault((end, key), []).append(new)
        is_limited |= step.is_limited
        # Comparing all with all is what takes long.
        for most in (2 * most_states, most_states):
            if step.open and sum(map(len, following.values())) > most:
                following, is_exact = _most_promising(problem, following, stage, most), False
            following = {key: keep_best(ways, count) for key, ways in following.items()}
        reached = following
    return Reached([way for ways in reached.values() for way in ways], is_limited, is_exact)


def _stages_needed(problem: CutProblem, limit: int) -> list[int]:
    """Return into how many stages the layers from each on must be cut at least, if a stage may take up to the limit."""
    needed = [0] * (problem.layers + 1)
    most = limit - min(problem.base)
    for layer in reversed(range(problem.layers)):
        end = bisect_right(problem.time, problem.time[layer] + most) - 1
        needed[layer] = problem.stages + 1 if end <= layer else 1 + needed[end]
    return needed


class _Step:
    """Adds one stage to ways.

    Attributes:
        open: the ranks that have stages and get further ones, after this stage.
        is_limited: whether the limit of time has excluded any.
    """

    def __init__(self, problem: CutProblem, stage: int, limit: int, stages_needed: list[int]) -> None:
        self.problem, self.stage, self.limit, self.stages_needed = problem, stage, limit, stages_needed
        self.rank = problem.rank_of[stage]
        before, later = problem.rank_of[:stage], problem.rank_of[stage + 1 :]
        self.places = {rank: 3 * place for place, rank in enumerate(sorted(set(before) & {*later, self.rank}))}
        self.open = sorted({*before, self.rank} & set(later))
        self.fresh_room = sum(limit - problem.base[rank] for rank in set(later) - {*before, self.rank})
        self.crosses = bool(later) and later[0] != self.rank
        self.ahead = len(later)
        self.is_limited = False

    def extend(self, begin: int, way: Way) -> Iterator[tuple[int, Way]]:
        """Yield where the stage may end, and the way with it."""
        problem, rank = self.problem, self.rank
        mine = self._load(way, rank)
        others = {each: self._load(way, each) for each in self.open if each != rank}
        room = self.fresh_room + sum(self.limit - load[0] for load in others.values())
        last = problem.layers - self.ahead
        for end in range(begin + 1 if self.ahead else last, last + 1):
            added = problem.of_stage(self.stage, begin, end)
            load = (mine[0] + added.time, mine[1] + added.least, mine[2] + added.held)
            if load[0] > self.limit:
                self.is_limited = True
                return
            if load[1] > problem.limits[rank]:
                return
            own = self.limit - load[0] if rank in self.open else 0
            if self.stages_needed[end] > self.ahead or problem.time[-1] - problem.time[end] > room + own:
                self.is_limited = True
                continue
            time, longest, held, transfer = way.value
            transfer += problem.transfers[end] if self.crosses else 0
            loads = [load if each == rank else others[each] for each in self.open]
            value = (max(time, load[0]), max(longest, added.time), max(held, load[2]), transfer)
            yield end, Way(value, tuple(number for each in loads for number in each), (*way.bounds, end))

    def _load(self, way: Way, rank: int) -> tuple[int, int, int]:
        if rank not in self.places:
            return self.problem.base[rank], 0, 0
        time, least, held = way.loads[self.places[rank] : self.places[rank] + 3]
        return time, least, held

    def place(self, homes: tuple[int, ...], begin: int, end: int) -> tuple[int, ...] | None:
        """Return on which rank each group then is; None if a group would be on two."""
        placed = []
        for home, group in zip(homes, self.problem.together, strict=True):
            here = any(begin <= layer < end for layer in group)
            if here and home not in (-1, self.rank):
                return None
            placed.append(self.rank if here else home)
        return tuple(placed)


def _most_promising(
    problem: CutProblem, reached: dict[_Key, list[Way]], stage: int, most: int
) -> dict[_Key, list[Way]]:
    """Keep the ways that may become the best, and of those the ones that load the ranks most evenly so far."""
    total, stages = problem.time[-1], problem.stages
    placed = problem.rank_of[: stage + 1]
    open_ranks = sorted(set(placed) & set(problem.rank_of[stage + 1 :]))
    to_fill = len(set(problem.rank_of[stage + 1 :]))
    shares = [placed.count(rank) for rank in open_ranks]

    def promise(key: _Key, way: Way) -> tuple[int, ...]:
        time, longest, held, transfer = way.value
        remaining = total - problem.time[key[0]]
        loads = way.loads[0::3]
        time = max(time, (sum(loads) + remaining) // to_fill)
        longest = max(longest, remaining // (stages - stage - 1))
        uneven = sum((load * stages - share * total) ** 2 for load, share in zip(loads, shares, strict=True))
        return problem.order((time, longest, 0, 0))[0], uneven, held, transfer

    return _smallest(reached, most, promise)


def _smallest(
    reached: dict[_AnyKey, list[Way]], most: int, order: Callable[[_AnyKey, Way], tuple[int, ...]]
) -> dict[_AnyKey, list[Way]]:
    """Keep the ways that come first in some order."""
    entries = sorted((order(key, way), way, key) for key, ways in reached.items() for way in ways)
    kept: dict[_AnyKey, list[Way]] = {}
    for _, way, key in entries[:most]:
        kept.setdefault(key, []).append(way)
    return kept
