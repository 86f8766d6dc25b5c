"""Lays out a part of an order for the model: the tasks that start in a window of time, everything else as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.planning.exact.memory import rooms_between
from penstock.planning.exact.model import Part
from penstock.planning.exact.timed import Tasks, Wait, longest_paths, starts_of
from penstock.planning.exact.whole import in_turn, place_in_time
from penstock.planning.orders import Order

if TYPE_CHECKING:
    from penstock.planning.exact.runs import Solution
    from penstock.simulation.problem import Problem


class Timed(NamedTuple):
    """An order, when its tasks run, and what follows them.

    Attributes:
        tasks: the tasks.
        starts: when each starts.
        tails: how far the end of each is from the end of all, or from what its rank may last.
        by_time: the tasks, so that none comes before one that it waits for.
    """

    tasks: Tasks
    starts: list[int]
    tails: list[int]
    by_time: list[int]

    @classmethod
    def of(cls, tasks: Tasks, *, has_own_begins: bool) -> Timed:
        """Return when the tasks run; with own begins, the time of each rank counts from its own first start."""
        starts = starts_of(tasks)
        rows = [row for row in tasks.rows if row]
        last = {row[-1]: -(starts[row[0]] if has_own_begins else tasks.dispatch) for row in rows}
        tails = [0 if tail is None else tail for tail in longest_paths(tasks, last, reverse=True)]
        steps = tasks._replace(
            all=[task._replace(time=0) for task in tasks.all],
            data=[wait._replace(delay=1) for wait in tasks.data],
            dispatch=1,
        )
        depth = starts_of(steps)
        return cls(tasks, starts, tails, sorted(range(len(starts)), key=lambda task: (starts[task], depth[task])))

    @property
    def value(self) -> int:
        """The makespan, or the span."""
        known = zip(self.starts, self.tasks.all, self.tails, strict=True)
        return max((start + task.time + tail for start, task, tail in known), default=0)


class Window(NamedTuple):
    """A window and its part of the model.

    Attributes:
        chosen: the task for each of the part.
        part: what the model decides.
    """

    chosen: list[int]
    part: Part


def window_of(problem: Problem, timed: Timed, begin: int, width: int) -> Window:
    """Return the window that begins with one of ``timed.by_time``."""
    tasks = timed.tasks
    chosen = sorted(timed.by_time[begin : begin + width])
    local = {task: number for number, task in enumerate(chosen)}
    rows = [(row, [task for task in row if task in local]) for row in tasks.rows]
    rows = [(row, mine) for row, mine in rows if mine]
    inner = [wait for wait in tasks.data if wait.before in local and wait.after in local]
    place = {tasks.all[task].key: local[task] for task in chosen}
    part = Part(
        times=[tasks.all[task].time for task in chosen],
        earliest=_earliest(timed, local, rows),
        fixed={},
        tails=_tails(timed, local, rows),
        waits=[
            *(Wait(local[before], local[after], delay) for before, after, delay in inner),
            *in_turn(place, tasks.dispatch),
        ],
        machines=[[local[task] for task in mine] for _, mine in rows],
        dispatch=tasks.dispatch,
        rooms=[room for row, mine in rows for room in rooms_between(problem, tasks, row, mine, local)],
        merges=[],
        begins=[],
        rank_of=[tasks.all[task].rank for task in chosen],
        least=0,
        most=timed.value - 1,
        hint=([timed.starts[task] for task in chosen], set()),
    )
    return Window(chosen, part)


def _earliest(timed: Timed, local: dict[int, int], rows: list[tuple[list[int], list[int]]]) -> list[int]:
    """Return when the tasks of a window can start, as far as that depends on tasks before it."""
    tasks = timed.tasks
    earliest = [tasks.dispatch] * len(local)
    for row, mine in rows:
        place = row.index(mine[0])
        for task in mine if place else ():
            earliest[local[task]] = _end(timed, row[place - 1]) + tasks.dispatch
    for before, after, delay in tasks.data:
        if after in local and before not in local:
            earliest[local[after]] = max(earliest[local[after]], _end(timed, before) + delay)
    return earliest


def _tails(timed: Timed, local: dict[int, int], rows: list[tuple[list[int], list[int]]]) -> list[int | None]:
    """Return how far the tasks of a window are from the end, as far as that depends on tasks after it."""
    tasks = timed.tasks
    tails = [0] * len(local)
    for row, mine in rows:
        follower = row.index(mine[-1]) + 1
        for task in mine:
            tails[local[task]] = timed.tails[row[-1]]
            if follower < len(row):
                tails[local[task]] = tasks.dispatch + _time_from(timed, row[follower])
    for before, after, delay in tasks.data:
        if before in local and after not in local:
            tails[local[before]] = max(tails[local[before]], delay + _time_from(timed, after))
    return list(tails)


def _end(timed: Timed, task: int) -> int:
    return timed.starts[task] + timed.tasks.all[task].time


def _time_from(timed: Timed, task: int) -> int:
    return timed.tasks.all[task].time + timed.tails[task]


def order_with(timed: Timed, window: Window, solution: Solution) -> Order:
    """Return the order in which the window runs as in the solution."""
    tasks = timed.tasks
    start = dict(zip(window.chosen, solution.starts, strict=True))
    rows = []
    for row in tasks.rows:
        places = [place for place, task in enumerate(row) if task in start]
        mine = sorted((row[place] for place in places), key=lambda task: place_in_time(tasks.all[task], start[task]))
        changed = list(row)
        for place, task in zip(places, mine, strict=True):
            changed[place] = task
        rows.append([tasks.all[task].token for task in changed])
    return Order.from_rows(rows)
