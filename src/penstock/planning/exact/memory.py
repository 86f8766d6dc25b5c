"""Writes the memory limits of a problem for the model: as what has to wait for what where possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.planning.exact.model import Hold, Room
from penstock.planning.exact.timed import Key, Tasks, Wait
from penstock.planning.exact.units import ROUNDING, Units
from penstock.planning.orders import F, I, W

if TYPE_CHECKING:
    from penstock.simulation.problem import Problem


def memory_of(problem: Problem, place: dict[Key, int]) -> tuple[list[Room], list[Wait]]:
    """Return the memory of ranks, and what waits for memory anyway, given the task of each action.

    Since all microbatches of a stage are alike, the i-th F of a stage that has its rank for itself needs a certain
    number of I or B, and of W, to have ended. If only one of the two releases memory, that is all.
    """
    rooms, waits = [], []
    amounts = np.stack([problem.input_release, problem.weight_release], axis=1)
    for rank in range(problem.ranks):
        stages = np.flatnonzero(problem.rank_of == rank).tolist()
        limit = _limit(problem, rank)
        if limit >= problem.activation[stages].sum() * problem.microbatches:
            continue
        units = Units.of([*amounts[stages].ravel().tolist()], largest=limit)
        capacity = units.nearly_down(limit)
        released = {stage: [units.round(amount) for amount in amounts[stage]] for stage in stages}
        if len(stages) == 1:
            waits += _waits_of(stages[0], released[stages[0]], capacity, problem.microbatches, place)
        if len(stages) > 1 or all(released[stages[0]]):
            holds = [
                Hold(place[F, stage, number], place[side, stage, number], amount)
                for stage in stages
                for number in range(problem.microbatches)
                for side, amount in zip((I, W), released[stage], strict=True)
                if amount
            ]
            rooms.append(Room(capacity, holds))
    return rooms, waits


def _limit(problem: Problem, rank: int) -> float:
    """Return the memory for activations, as large as simulation lets it be: the tolerance is a share of all memory."""
    return float(problem.budget[rank] + ROUNDING * problem.memory_limit[rank])


def _waits_of(stage: int, released: list[int], capacity: int, microbatches: int, place: dict[Key, int]) -> list[Wait]:
    """Return which I and W each F has to wait for, of a stage that has the memory of its rank for itself."""
    by_input, by_weight = released
    waits = []
    for number in range(microbatches):
        excess = (number + 1) * (by_input + by_weight) - capacity
        counts = {I: -(-excess // (by_input + by_weight))}
        if by_weight:
            counts[W] = -(-(excess - number * by_input) // by_weight)
        for side, count in counts.items():
            if 0 < count <= number:
                waits.append(Wait(place[side, stage, count - 1], place[F, stage, number], 0))
    return waits


def rooms_between(problem: Problem, tasks: Tasks, row: list[int], mine: list[int], local: dict[int, int]) -> list[Room]:
    """Return the memory of a rank while it runs some consecutive tasks of its row, given the numbers of these."""
    begin, end = row.index(mine[0]), row.index(mine[-1]) + 1
    stages = sorted({tasks.all[task].stage for task in row})
    rank = tasks.all[row[0]].rank
    limit = _limit(problem, rank)
    if limit >= problem.activation[stages].sum() * problem.microbatches:
        return []
    amounts = np.stack([problem.input_release, problem.weight_release], axis=1)
    units = Units.of(amounts[stages].ravel().tolist(), largest=limit)
    released = {stage: [units.round(amount) for amount in amounts[stage]] for stage in stages}
    at = {tasks.all[task].key: place for place, task in enumerate(row)}
    capacity, holds = units.nearly_down(limit), []
    for (side, stage, number), taken in at.items():
        if side != F or taken >= end:
            continue
        for releasing, amount in zip((I, W), released[stage], strict=True):
            # B releases what I and W do.
            freed = at.get((releasing, stage, number), at[I, stage, number])
            if freed < begin or not amount:
                continue
            if taken < begin and freed >= end:
                capacity -= amount
            else:
                first = None if taken < begin else local[row[taken]]
                holds.append(Hold(first, None if freed >= end else local[row[freed]], amount))
    return [Room(capacity, holds)]
