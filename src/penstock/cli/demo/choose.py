"""Chooses the stages and the schedule of the demo: a plan for the measured costs, or stages for a given schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.ir.actions import BACKWARD_INPUT
from penstock.ir.schedule import Schedule
from penstock.planning.layers import Partition, stage_costs
from penstock.schedules.registry import build
from penstock.simulation.costs import Costs
from penstock.simulation.simulate import simulate
from penstock.simulation.timeline import Timeline

if TYPE_CHECKING:
    from penstock.planning.result import Plan


class Chosen(NamedTuple):
    """What runs, and why.

    Attributes:
        name: the name of the schedule.
        schedule: the schedule.
        layout: the modules of each stage.
        predicted: its simulation, with the measured costs.
        explanation: why this one, in lines.
        plan: the plan; None if the schedule was given.
    """

    name: str
    schedule: Schedule
    layout: list[list[str]]
    predicted: Timeline
    explanation: list[str]
    plan: Plan | None = None

    def write(self, folder: Path) -> None:
        """Write the schedule for the ranks, and as CSV for people and other programs."""
        self.schedule.write(folder / "schedule.json")
        if self.schedule.compute_only:
            self.schedule.write(folder / "schedule.csv")


def choose_plan(
    costs: Costs,
    names: Sequence[str],
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None,
    progress: Callable[[Any], object] | None,
) -> Chosen:
    """Plan stages and schedule for the costs of the layers, in the memory that 1F1B of even stages takes."""
    from penstock.planning.plan import plan  # which loads the compiler

    limit = _memory_of_even_stages(costs, len(names), ranks, microbatches)
    found = plan(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=limit,
        stages_per_rank=stages_per_rank,
        layers=True,
        progress=progress,
    )
    assert found.partition is not None
    lines = [f"planned for the measured costs, in {limit / 2**20:.1f} MiB per rank (what 1F1B of even stages takes)"]
    return Chosen(
        found.alternatives[0].name,
        found.schedule,
        [list(group) for group in found.partition.group(list(names))],
        found.timeline,
        [*lines, *_summary(found), _prediction(found.timeline)],
        found,
    )


def _summary(found: Plan) -> list[str]:
    """Say what was planned, in milliseconds and MiB."""
    chosen, sizes = found.alternatives[0], found.partition.sizes if found.partition is not None else ()
    proof = "proved optimal" if found.is_optimal else f"at most {found.gap:.1%} above the optimum"
    return [
        f"chosen: {chosen.name}, {chosen.placement}; {proof} among the placements tried",
        f"memory: at most {max(found.timeline.peak_memory) / 2**20:.1f} MiB on a rank",
        f"layers per stage: {', '.join(map(str, sizes))}",
    ]


def choose_schedule(schedule: Schedule, costs: Costs, names: Sequence[str]) -> Chosen:
    """Cut the layers for this schedule, by their costs."""
    from penstock.planning.partition import PartitionProblem  # likewise

    problem = PartitionProblem.of(
        costs, schedule.placement, layers=len(names), microbatches=schedule.microbatches, splits=_splits(schedule)
    )
    partition = problem.best(count=1).partitions[0]
    predicted = simulate(schedule, stage_costs(costs, partition))
    sizes = ", ".join(map(str, partition.sizes))
    return Chosen(
        str(schedule.metadata.get("name") or "schedule"),
        schedule,
        [list(group) for group in partition.group(list(names))],
        predicted,
        [f"layers per stage, by their measured costs: {sizes}", _prediction(predicted)],
    )


def _memory_of_even_stages(costs: Costs, layers: int, ranks: int, microbatches: int) -> float:
    partition = Partition.even(layers, ranks)
    usual = build("1F1B", ranks=ranks, microbatches=microbatches)
    return max(simulate(usual, stage_costs(costs, partition)).peak_memory)


def _splits(schedule: Schedule) -> bool:
    cells = (cell for row in schedule.actions for cell in row if cell)
    return any(part.computation_type is BACKWARD_INPUT for cell in cells for part in cell.parts)


def _prediction(timeline: Timeline) -> str:
    return f"predicted: {timeline.makespan * 1e3:.1f} ms per step, {timeline.bubble_rate:.1%} bubble"
