"""Builds the model of a scheduling problem for CP-SAT: starts of tasks, machines, memory and the objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.planning.exact.cp_sat import cp_model

if TYPE_CHECKING:
    from penstock.planning.exact.timed import Wait


class Hold(NamedTuple):
    """That memory is taken from the start of one task to the end of another.

    Attributes:
        first: the task that takes it; None if it is taken already.
        last: the task that releases it; None if none of the tasks does.
        amount: how much.
    """

    first: int | None
    last: int | None
    amount: int


class Room(NamedTuple):
    """The memory of a rank."""

    capacity: int
    holds: list[Hold]


class Merge(NamedTuple):
    """That I and W of a microbatch may be one B instead.

    Attributes:
        input: the task that is I or B.
        weight: the task that is W or nothing.
        whole: how long B takes.
    """

    input: int
    weight: int
    whole: int


class Part(NamedTuple):
    """What a model decides: when some tasks start, in whole units.

    Attributes:
        times: how long each task takes.
        earliest: when each can start at the earliest.
        fixed: when some of them start in any case.
        tails: what has to follow the end of each until everything has ended; None if the order of others implies it.
        waits: what has to follow what.
        machines: tasks that a rank runs in any order, for each rank.
        dispatch: the time between two tasks of a rank.
        rooms: the memory of each rank.
        merges: what may be merged.
        begins: if ranks may begin late, for each rank the tasks that may be its first: tails then count from there.
        rank_of: the rank of each task.
        least: a bound of the objective.
        most: no larger objective is of interest.
        hint: when each task starts in a known solution, and the inputs of the merges that it makes.
    """

    times: list[int]
    earliest: list[int]
    fixed: dict[int, int]
    tails: list[int | None]
    waits: list[Wait]
    machines: list[list[int]]
    dispatch: int
    rooms: list[Room]
    merges: list[Merge]
    begins: list[list[int]]
    rank_of: list[int]
    least: int
    most: int
    hint: tuple[list[int], set[int]]


class Model(NamedTuple):
    """A model and its variables.

    Attributes:
        model: that of CP-SAT.
        starts: the start of each task.
        merged: whether each merge is made.
        objective: what is minimised.
    """

    model: Any
    starts: list[Any]
    merged: list[Any]
    objective: Any


class _Variables(NamedTuple):
    """The variables of tasks, and expressions of them.

    Attributes:
        starts: the start of each task.
        sizes: how long each takes.
        ends: the end of each.
        begins: when each rank begins, if that is free.
        merged: whether each merge is made.
        absent: of tasks that a merge may make superfluous, whether it is.
    """

    starts: list[Any]
    sizes: list[Any]
    ends: list[Any]
    begins: list[Any]
    merged: list[Any]
    absent: dict[int, Any]


def build_model(part: Part) -> Model:
    """Build the model. Its solutions are the schedules that are no worse than ``part.most``."""
    model = cp_model().CpModel()
    latest = part.most - min((tail for tail in part.tails if tail is not None), default=0)
    latest += max(part.hint[0]) + sum(part.times) if part.begins else 0
    given = _variables_of(model, part, latest)
    objective = model.new_int_var(part.least, max(part.least, part.most), "")
    _add_waits(model, part, given)
    _add_tails(model, part, given, objective)
    for tasks in part.machines:
        _add_machine(model, tasks, part, given)
    for room in part.rooms:
        _add_room(model, room, latest, given)
    for task, start in enumerate(part.hint[0]):
        model.add_hint(given.starts[task], start)
    for merge, choice in zip(part.merges, given.merged, strict=True):
        model.add_hint(choice, merge.input in part.hint[1])
    model.minimize(objective)
    return Model(model, given.starts, given.merged, objective)


def _variables_of(model: Any, part: Part, latest: int) -> _Variables:
    starts = [
        model.new_int_var(part.fixed.get(task, earliest), part.fixed.get(task, latest), "")
        for task, earliest in enumerate(part.earliest)
    ]
    begins = [starts[tasks[0]] if len(tasks) == 1 else model.new_int_var(0, latest, "") for tasks in part.begins]
    merged = [model.new_bool_var("") for _ in part.merges]
    sizes: list[Any] = list(part.times)
    for merge, choice in zip(part.merges, merged, strict=True):
        sizes[merge.input] += (merge.whole - part.times[merge.input]) * choice
        sizes[merge.weight] *= 1 - choice
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    for task in (task for merge in part.merges for task in (merge.input, merge.weight)):
        ends[task] = model.new_int_var(0, latest, "")  # intervals take no sums of variables
        model.add(ends[task] == starts[task] + sizes[task])
    absent = {merge.weight: choice for merge, choice in zip(part.merges, merged, strict=True)}
    return _Variables(starts, sizes, ends, begins, merged, absent)


def _add_waits(model: Any, part: Part, given: _Variables) -> None:
    """Let tasks wait for others. An absent one takes no time, directly after what replaces it."""
    for before, after, delay in part.waits:
        follows = model.add(given.starts[after] >= given.ends[before] + delay)
        if before in given.absent and after in given.absent:
            follows.only_enforce_if(~given.absent[before], ~given.absent[after])
    for merge, choice in zip(part.merges, given.merged, strict=True):
        model.add(given.starts[merge.weight] == given.ends[merge.input]).only_enforce_if(choice)


def _add_tails(model: Any, part: Part, given: _Variables, objective: Any) -> None:
    """Let the objective be what it takes until the end, from the beginning of all or of each rank."""
    for tasks, begin in zip(part.begins, given.begins, strict=True):
        for task in tasks if len(tasks) > 1 else ():
            model.add(given.starts[task] >= begin)
    for task, tail in enumerate(part.tails):
        if tail is not None:
            begin = given.begins[part.rank_of[task]] if part.begins else 0
            model.add(objective >= given.ends[task] + tail - begin)


def _add_machine(model: Any, tasks: list[int], part: Part, given: _Variables) -> None:
    """Let a rank run one task at a time."""
    intervals = []
    for task in tasks:
        begin = given.starts[task] - part.dispatch
        if task in given.absent:
            size = part.times[task] + part.dispatch
            intervals.append(model.new_optional_fixed_size_interval_var(begin, size, ~given.absent[task], ""))
        else:
            intervals.append(model.new_interval_var(begin, given.sizes[task] + part.dispatch, given.ends[task], ""))
    if len(intervals) > 1:
        model.add_no_overlap(intervals)


def _add_room(model: Any, room: Room, latest: int, given: _Variables) -> None:
    """Let a rank hold no more memory than it has."""
    intervals = []
    for first, last, _ in room.holds:
        begin = 0 if first is None else given.starts[first]
        end = latest if last is None else given.ends[last]
        intervals.append(model.new_interval_var(begin, model.new_int_var(0, latest, ""), end, ""))
    if intervals:
        model.add_cumulative(intervals, [hold.amount for hold in room.holds], room.capacity)
