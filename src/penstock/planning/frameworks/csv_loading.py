"""Decides what frameworks run that load a CSV but place stages by themselves: in a loop, or a V for some schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir.placement import Placement
from penstock.planning.frameworks.settings import explain, nearest
from penstock.schedules.registry import RECIPES

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule
    from penstock.planning.frameworks.settings import Request

#: The schedules to choose from if the placement of a plan is not possible; all are in a loop or a V.
PLACEABLE: Final = tuple(each.name for each in RECIPES if each.name != "ForwardOnly")


class Loading(NamedTuple):
    """How a framework is made to run a schedule.

    Attributes:
        schedule_name: the schedule to name; with a CSV it only decides where stages are placed.
        schedule: what runs.
        names: the names of the modules of each stage, if they are known.
        value: its makespan.
        notes: how that differs from the plan.
    """

    schedule_name: str
    schedule: Schedule
    names: tuple[tuple[str, ...], ...] | None
    value: float
    notes: tuple[str, ...]


def loading_of(request: Request, framework: str) -> Loading:
    """Name a schedule with the placement of the plan, or replace the plan by the nearest one that can be placed."""
    schedule, names, value = request.schedule, request.names, request.planned
    notes: tuple[str, ...] = ()
    if placing_name(schedule) is None:
        chosen = nearest(request, PLACEABLE)
        notes = explain(request, chosen, f"{framework} places stages in a loop or, two per rank, in a V")
        schedule, names, value = chosen.schedule, chosen.names, chosen.value
    if names is None:
        notes += (
            f"the names of modules are unknown, so {framework} cuts the model by itself, and the value holds only if "
            "that gives the stages of the plan; pass names=",
        )
    return Loading(placing_name(schedule) or "", schedule, names, value, notes)


def placing_name(schedule: Schedule) -> str | None:
    """Return a schedule to name so that stages are placed as in this one; None if there is none."""
    ranks, stages = schedule.ranks, schedule.stages
    if schedule.placement == Placement.loop(ranks, stages) and stages % ranks == 0:
        return "PipelineScheduleSingle" if stages == ranks else "PipelineScheduleMulti"
    return "ZBVZeroBubble" if schedule.placement == Placement.v(ranks, 2 * ranks) else None
