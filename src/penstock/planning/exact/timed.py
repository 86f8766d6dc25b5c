"""Computes when an order runs its actions, in whole units: what the exact search starts from."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.planning.orders import KINDS, B, F, I, W, microbatches_of

if TYPE_CHECKING:
    from penstock.planning.exact.units import Units
    from penstock.planning.orders import Order
    from penstock.simulation.problem import Inputs, Problem

#: An action, by whether it is F, I or B, or W; its stage; and its microbatch.
Key = tuple[int, int, int]
#: An action that waits for I waits for B just as well.
SIDE: Final = {F: F, I: I, W: W, B: I}


class Task(NamedTuple):
    """An action of a rank and how long it takes."""

    rank: int
    token: int
    number: int
    time: int

    @property
    def stage(self) -> int:
        """Its stage."""
        return self.token // KINDS

    @property
    def kind(self) -> int:
        """F, I, W or B."""
        return self.token % KINDS

    @property
    def key(self) -> Key:
        """What others refer to it by."""
        return SIDE[self.kind], self.stage, self.number


class Wait(NamedTuple):
    """That a task starts only some time after the end of another one."""

    before: int
    after: int
    delay: int


class Tasks(NamedTuple):
    """The actions of an order and what they wait for.

    Attributes:
        all: the actions, rank after rank in order.
        rows: for each rank, the indices of its actions, in order.
        data: what waits for the output of what.
        dispatch: the time between two actions of a rank.
    """

    all: list[Task]
    rows: list[list[int]]
    data: list[Wait]
    dispatch: int

    @property
    def waits(self) -> list[Wait]:
        """What waits for what, the order of the ranks included."""
        pairs = ((row[at], row[at + 1]) for row in self.rows for at in range(len(row) - 1))
        return [*self.data, *(Wait(before, after, self.dispatch) for before, after in pairs)]


def tasks_of(problem: Problem, order: Order, units: Units) -> Tasks:
    """Return the actions of an order."""
    times = [
        [units.round(time) for time in of_kind]
        for of_kind in (problem.forward, problem.input, problem.weight, problem.whole)
    ]
    tasks: list[Task] = []
    rows = []
    for rank, row in enumerate(order.rows):
        rows.append(list(range(len(tasks), len(tasks) + len(row))))
        for token, number in zip(row.tolist(), microbatches_of(row).tolist(), strict=True):
            tasks.append(Task(rank, token, number, times[token % KINDS][token // KINDS]))
    place = {task.key: index for index, task in enumerate(tasks)}
    inputs = {F: _of_stages(problem.forward_inputs, units), I: _of_stages(problem.backward_inputs, units)}
    data = []
    for index, task in enumerate(tasks):
        side, stage, number = task.key
        if side != F:
            data.append(Wait(place[F if side == I else I, stage, number], index, 0))
        for source, delay in inputs[side][stage] if side != W else ():
            data.append(Wait(place[side, source, number], index, delay))
    return Tasks(tasks, rows, data, units.round(problem.dispatch))


def _of_stages(inputs: Inputs, units: Units) -> list[list[tuple[int, int]]]:
    stage, delay = inputs.stage.tolist(), [units.round(each) for each in inputs.delay]
    first = inputs.first.tolist()
    return [[(stage[entry], delay[entry]) for entry in range(begin, end)] for begin, end in pairwise(first)]


def longest_paths(tasks: Tasks, sources: dict[int, int] | None = None, *, reverse: bool = False) -> list[int | None]:
    """Return when each task starts, given the earliest starts of some; None if it waits for none of these.

    In reverse, return for each task how far its end is from the ends, given what follows the ends of some.
    """
    following: list[list[tuple[int, int]]] = [[] for _ in tasks.all]
    missing = [0] * len(tasks.all)
    for before, after, delay in tasks.waits:
        source, target = (after, before) if reverse else (before, after)
        following[source].append((target, delay))
        missing[target] += 1
    found: list[int | None] = [None] * len(tasks.all)
    for task, least in (sources or {}).items():
        found[task] = least
    ready = [task for task, count in enumerate(missing) if count == 0]
    while ready:
        task = ready.pop()
        base = found[task]
        for other, delay in following[task]:
            if base is not None:
                known = found[other]
                reached = base + tasks.all[task].time + delay
                found[other] = reached if known is None else max(known, reached)
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return found


def starts_of(tasks: Tasks) -> list[int]:
    """Return when each task starts if each starts as soon as it can."""
    begins = {row[0]: tasks.dispatch for row in tasks.rows if row}
    return [0 if start is None else start for start in longest_paths(tasks, begins)]
