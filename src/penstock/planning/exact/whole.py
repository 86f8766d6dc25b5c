"""Lays out all orders of a problem for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.planning.exact.memory import memory_of
from penstock.planning.exact.model import Merge, Part
from penstock.planning.exact.timed import Key, Task, Tasks, Wait, starts_of, tasks_of
from penstock.planning.exact.units import ROUNDING
from penstock.planning.exact.values import optimizers_of
from penstock.planning.orders import KINDS, B, F, I, Order, W

if TYPE_CHECKING:
    from penstock.planning.exact.runs import Solution
    from penstock.planning.exact.units import Units
    from penstock.simulation.problem import Problem


class Whole(NamedTuple):
    """A problem whose orders are all searched.

    Attributes:
        tasks: its actions; the backwards of stages that may split them are split.
        part: what the model decides.
    """

    tasks: Tasks
    part: Part


def whole_of(problem: Problem, objective: str, hint: Order, units: Units, least: int, most: int) -> Whole:
    """Return the model's view of a problem."""
    tasks = tasks_of(problem, _split(problem, hint), units)
    place = {task.key: index for index, task in enumerate(tasks.all)}
    starts = starts_of(tasks)
    merges = _merges(problem, place, units)
    firsts = first_stages(problem)
    is_late = objective == "period" or (objective == "span" and firsts is None)
    begins = _first_tasks(tasks, place, firsts) if is_late else []
    fixed = {}
    if firsts is not None and objective == "span":
        fixed = {place[F, stage, 0]: starts[place[F, stage, 0]] for stage in firsts.values()}
    optimizers = [units.round(time) for time in optimizers_of(problem)]
    tails: list[int | None] = [None] * len(tasks.all)
    for index, task in enumerate(tasks.all):
        if task.kind != F and (task.number == problem.microbatches - 1 or merges):
            begin = starts[place[F, firsts[task.rank], 0]] if firsts and objective == "span" else tasks.dispatch
            tails[index] = 0 if is_late else -begin
            if objective == "period":
                tails[index] = tasks.dispatch + optimizers[task.rank]
    rooms, waits = memory_of(problem, place)
    part = Part(
        times=[task.time for task in tasks.all],
        earliest=[tasks.dispatch] * len(tasks.all),
        fixed=fixed,
        tails=tails,
        waits=[*tasks.data, *in_turn(place, tasks.dispatch), *waits],
        machines=tasks.rows,
        dispatch=tasks.dispatch,
        rooms=rooms,
        merges=merges,
        begins=begins,
        rank_of=[task.rank for task in tasks.all],
        least=least,
        most=most,
        hint=_hinted(problem, hint, tasks, units),
    )
    return Whole(tasks, part)


def order_of(whole: Whole, solution: Solution) -> Order:
    """Return the order of a solution."""
    chosen = [merge for merge, is_made in zip(whole.part.merges, solution.merged, strict=True) if is_made]
    times, tokens = whole.part.times.copy(), [task.token for task in whole.tasks.all]
    for merge in chosen:
        times[merge.input] = merge.whole
        tokens[merge.input] += B - I
    gone = {merge.weight for merge in chosen}

    def place(index: int) -> tuple[int, ...]:
        return place_in_time(whole.tasks.all[index]._replace(time=times[index]), solution.starts[index])

    rows = [sorted((index for index in row if index not in gone), key=place) for row in whole.tasks.rows]
    return Order.from_rows([tokens[index] for index in row] for row in rows)


def place_in_time(task: Task, start: int) -> tuple[int, ...]:
    """Return what to sort tasks by: the time; of tasks that take none, those come first that others need."""
    side, stage, number = task.key
    return start, start + task.time, side, stage if side == F else -stage, number


def first_stages(problem: Problem) -> dict[int, int] | None:
    """Return for each rank the stage whose F comes first in all orders and starts at the same time in all of them.

    That holds if every other stage of the rank needs its output, directly or not, and if the same is true of the ranks
    whose outputs it needs itself: so for one stage per rank, loops and V. None if it does not hold for all ranks.
    """
    inputs = problem.forward_inputs
    needs: list[set[int]] = []  # edges go from lower stages to higher ones
    for stage in range(problem.stages):
        sources = inputs.stage[inputs.first[stage] : inputs.first[stage + 1]].tolist()
        needs.append(set(sources).union(*(needs[source] for source in sources)))
    firsts = {rank: min(stages) for rank in range(problem.ranks) if (stages := problem.placement.stages_of(rank))}
    for stage, rank in enumerate(problem.placement.rank_of):
        if stage != firsts[rank] and firsts[rank] not in needs[stage]:
            return None
    if any(source not in firsts.values() for first in firsts.values() for source in needs[first]):
        return None
    return firsts


def _first_tasks(tasks: Tasks, place: dict[Key, int], firsts: dict[int, int] | None) -> list[list[int]]:
    """Return for each rank which tasks may be its first."""
    if firsts is not None:
        return [[place[F, firsts[rank], 0]] if row else [] for rank, row in enumerate(tasks.rows)]
    return [[task for task in row if tasks.all[task].key == (F, tasks.all[task].stage, 0)] for row in tasks.rows]


def _split(problem: Problem, order: Order) -> Order:
    """Return the order with every B that may be split as I and W."""
    rows = []
    for row in order.rows:
        halves = (row % KINDS == B) & problem.splits[row // KINDS]
        twice = np.repeat(row, 1 + halves)
        at = np.flatnonzero(halves) + np.arange(np.count_nonzero(halves))
        twice[at] += I - B
        twice[at + 1] += W - B
        rows.append(twice)
    return Order.from_rows(rows)


def _merges(problem: Problem, place: dict[Key, int], units: Units) -> list[Merge]:
    """Return which microbatches may run B although they may be split: all of a stage where that is faster."""
    apart = problem.input + problem.weight + problem.dispatch
    faster = np.flatnonzero(problem.splits & (problem.whole < apart * (1 - ROUNDING)))
    return [
        Merge(place[I, stage, number], place[W, stage, number], units.round(problem.whole[stage]))
        for stage in faster.tolist()
        for number in range(problem.microbatches)
    ]


def in_turn(place: dict[Key, int], dispatch: int) -> list[Wait]:
    """Let the microbatches of a stage take turns: they are alike, so nothing is lost."""
    return [
        Wait(place[side, stage, number - 1], index, dispatch)
        for (side, stage, number), index in place.items()
        if (side, stage, number - 1) in place
    ]


def _hinted(problem: Problem, hint: Order, tasks: Tasks, units: Units) -> tuple[list[int], set[int]]:
    """Return when each task starts in the hint, and the I that are B there."""
    given = tasks_of(problem, hint, units)
    known = dict(zip((task.key for task in given.all), zip(starts_of(given), given.all, strict=True), strict=True))
    starts, merged = [], set()
    for index, task in enumerate(tasks.all):
        side, stage, number = task.key
        if (side, stage, number) in known:
            start, found = known[side, stage, number]
            if found.kind == B and task.kind == I:
                merged.add(index)
        else:
            before, found = known[I, stage, number]
            start = before + (tasks.all[index - 1].time if not problem.splits[stage] else found.time)
        starts.append(start)
    return starts, merged
