"""Defines what is written for a framework, and finds the schedule nearest to a plan that the framework has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import PlanError, ScheduleError, WriteError
from penstock.planning.layers import Partition, stage_costs
from penstock.schedules.registry import build, recipe
from penstock.simulation.costs import Costs
from penstock.simulation.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.ir.schedule import Schedule

#: The file that holds a schedule.
CSV_NAME = "schedule.csv"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to tell a framework so that it runs a plan, or what comes nearest to it.

    Attributes:
        framework: its name.
        text: the settings, as the framework reads them.
        files: the files to write, by name; the settings are one of them, if they are a file.
        notes: what the framework does differently, and what remains to be done.
        schedule: what the framework then runs.
        value: its makespan.
        planned: the makespan of the plan.
    """

    framework: str
    text: str
    files: Mapping[str, str]
    notes: tuple[str, ...]
    schedule: Schedule
    value: float
    planned: float

    @property
    def slowdown(self) -> float:
        """How much longer a step takes than planned, as a share of the plan: 0.05 is 5 % longer."""
        return self.value / self.planned - 1 if self.planned else 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A plan that is to be written for a framework.

    Attributes:
        schedule: the schedule, compute-only.
        costs: the costs of its stages.
        names: the names of the modules of each stage, if they are known.
        memory_limit: the memory of each rank, if it is limited.
        planned: the makespan of the plan.
    """

    schedule: Schedule
    costs: Costs
    names: tuple[tuple[str, ...], ...] | None
    memory_limit: tuple[float, ...] | None
    planned: float

    @property
    def stages_per_rank(self) -> int:
        """The number of stages of every rank; 0 if it is not the same everywhere."""
        counts = {len(row) for row in self.schedule.placement.rows}
        return counts.pop() if len(counts) == 1 else 0


def request_for(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    names: Iterable[Iterable[str]] | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Request:
    """Check what is to be written for a framework."""
    if not schedule.compute_only:
        raise ScheduleError(
            "frameworks add transfers by themselves, so they need the schedule before ps.lower; pass that one"
        )
    if not schedule.is_chain:
        raise WriteError("frameworks run chains of stages only, but the schedule has other edges")
    costs = Costs() if costs is None else costs
    of_stages = None if names is None else tuple(tuple(each) for each in names)
    if of_stages is not None and len(of_stages) != schedule.stages:
        raise PlanError(
            f"names are given for {len(of_stages)} stages, but the schedule has {schedule.stages}; pass a list for "
            "each",
            field="names",
            value=names,
        )
    limits = None if memory_limit is None else tuple(np.broadcast_to(memory_limit, (schedule.ranks,)).tolist())
    return Request(schedule, costs, of_stages, limits, simulate(schedule, costs).makespan)


class Nearest(NamedTuple):
    """A schedule that a framework has.

    Attributes:
        name: its name in the registry.
        schedule: the schedule.
        names: the names of the modules of each of its stages, if they are known.
        value: its makespan.
        peak: the highest memory of each rank.
        fits: whether that is within the limit.
    """

    name: str
    schedule: Schedule
    names: tuple[tuple[str, ...], ...] | None
    value: float
    peak: tuple[float, ...]
    fits: bool


def nearest(request: Request, names: Iterable[str]) -> Nearest:
    """Return the plan itself if it is one of these schedules, otherwise the fastest of them that fits into memory.

    A schedule with one stage per rank gets the consecutive stages of a plan with several as one. If none fits into
    memory, it is the one that exceeds the limit the least.
    """
    found = [each for name in names for each in _built(request, name)]
    if not found:
        raise WriteError(
            f"{request.schedule.stages} stages on {request.schedule.ranks} ranks cannot be expressed; plan with the "
            "same number of stages on every rank"
        )
    if same := [each for each in found if is_same(each.schedule, request.schedule)]:
        return same[0]
    if any(each.fits for each in found):
        return min((each for each in found if each.fits), key=lambda each: each.value)
    limits = request.memory_limit or ()
    return min(found, key=lambda each: max(a - b for a, b in zip(each.peak, limits, strict=True)))


def _built(request: Request, name: str) -> Iterable[Nearest]:
    """Yield the schedule with this name, if it can have the stages of the plan or all stages of a rank as one."""
    schedule, count = request.schedule, request.stages_per_rank
    if not count:
        return
    for stages_per_rank in sorted({count, 1}):
        if stages_per_rank == 1 and recipe(name).any_stages:
            continue  # it is for several stages per rank
        try:
            built = build(
                name, ranks=schedule.ranks, microbatches=schedule.microbatches, stages_per_rank=stages_per_rank
            )
        except ScheduleError:
            continue  # it has another number of stages per rank
        groups = Partition.from_sizes([schedule.stages // built.stages] * built.stages)
        costs = stage_costs(request.costs, groups)
        names = None
        if request.names is not None:
            parts = (request.names[begin:end] for begin, end in pairwise(groups.bounds))
            names = tuple(tuple(chain.from_iterable(part)) for part in parts)
        timeline = simulate(built, costs)
        limits = request.memory_limit
        fits = limits is None or all(a <= b * (1 + 1e-9) for a, b in zip(timeline.peak_memory, limits, strict=True))
        yield Nearest(name, built, names, timeline.makespan, timeline.peak_memory, fits)


def explain(request: Request, chosen: Nearest, reason: str) -> tuple[str, ...]:
    """Describe how the chosen schedule differs from the plan; nothing if it does not."""
    if is_same(chosen.schedule, request.schedule):
        return ()
    slower = chosen.value / request.planned - 1 if request.planned else 0.0
    difference = f"{slower:.1%} longer than" if slower >= 0 else f"{-slower:.1%} shorter than"
    notes = [
        f"{reason}; the nearest schedule is {chosen.name}: a step takes {chosen.value:g}, {difference} the plan's "
        f"{request.planned:g}"
    ]
    if not chosen.fits and request.memory_limit is not None:
        over = int(np.argmax(np.subtract(chosen.peak, request.memory_limit)))
        notes.append(
            f"{chosen.name} does not fit into memory: rank {over} would hold {chosen.peak[over]:g} of "
            f"{request.memory_limit[over]:g}"
        )
    if chosen.schedule.stages != request.schedule.stages:
        notes.append(f"the {request.schedule.stages} stages of the plan are joined to {chosen.schedule.stages}")
    return tuple(notes)


def is_same(one: Schedule, other: Schedule) -> bool:
    """Return whether two schedules run the same actions in the same order on every rank."""
    pairs = zip(one.actions, other.actions, strict=False)
    return one.placement == other.placement and all(_running(a) == _running(b) for a, b in pairs)


def _running(row: Iterable[object]) -> list[object]:
    return [action for action in row if action is not None]
