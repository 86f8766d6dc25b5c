"""Simulates a schedule with given costs: the longest path through the event graph."""

from __future__ import annotations

from typing import Final

from penstock.errors import CostsError, ModelError, ScheduleError
from penstock.graph.comm_model import CommModel
from penstock.graph.start_times import start_times
from penstock.ir.numbers import whole_number
from penstock.ir.schedule import Schedule
from penstock.simulation.costs import Costs
from penstock.simulation.step_graph import StepGraph, build_step_graph
from penstock.simulation.timeline import Timeline

#: More actions, in all steps together, would not fit into memory.
MOST_ACTIONS: Final = 50_000_000


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    model: CommModel | None = None,
    steps: int = 1,
    synchronise: bool = True,
) -> Timeline:
    """Return the timeline in which each action starts as soon as it can.

    Exact, deterministic and linear: it is the longest path through the graph that also proves the schedule.

    >>> from penstock.schedules.registry import build
    >>> timeline = simulate(build("1F1B", ranks=4, microbatches=8), Costs(forward=1, backward_input=1))
    >>> timeline.makespan, timeline.bubble_rate, timeline.peak_memory
    (33.0, 0.2727272727272727, (4.0, 3.0, 2.0, 1.0))

    Args:
        schedule: compute-only, with implied transfers, or lowered.
        costs: what its actions cost; by default F, I and W take 1, and transfers 0.
        model: how communication behaves. By default, transfers take time but do not contend.
        steps: the number of consecutive steps to run.
        synchronise: whether a rank begins a step only after all ranks have ended the previous one.

    Raises:
        VerificationError: the schedule would not run.
        CostsError: the costs do not match the schedule.
    """
    graph, costs = prepare(schedule, costs, model, steps, synchronise=synchronise)
    duration = graph.durations(costs)
    start, critical = start_times(graph.order, duration, graph.delays(costs), graph.release_times(costs))
    return Timeline(schedule, costs, graph, start, duration, critical)


def prepare(
    schedule: Schedule,
    costs: Costs | None,
    model: CommModel | None = None,
    steps: int = 1,
    *,
    synchronise: bool = True,
) -> tuple[StepGraph, Costs]:
    """Check the arguments; return the graph of the schedule, and the costs with their default."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, got {schedule!r}")
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise CostsError(f"costs must be Costs, e.g. Costs(forward=1, backward_input=1), got {costs!r}")
    if model is not None and not isinstance(model, CommModel):
        raise ModelError(f"model must be a CommModel, e.g. CommModel('eager', 'pair'), got {model!r}")
    steps = whole_number("steps", steps, least=1, most=max(1, MOST_ACTIONS // max(1, len(schedule.codes))))
    graph = build_step_graph(schedule, model, steps, bool(synchronise))
    costs.check(schedule.stages, len(schedule.edges))
    return graph, costs
