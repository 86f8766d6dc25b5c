"""Defines what planning returns: the chosen schedule, the proof of how good it is, and what else was considered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.planning.objective import SAMPLES
from penstock.planning.planner import gap_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ir.schedule import Schedule
    from penstock.planning.frameworks.settings import Settings
    from penstock.planning.layers import Partition
    from penstock.planning.objective import Objective
    from penstock.simulation.costs import Costs
    from penstock.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Alternative:
    """A schedule that was considered.

    Attributes:
        name: the name of the schedule, or where it was found.
        placement: where its stages are, in words.
        timeline: its simulation.
        value: what the objective says.
        fits: whether it keeps the memory limit and splits only what can be split.
        reason: why it was not chosen; empty for the one that was.
    """

    name: str
    placement: str
    timeline: Timeline
    value: float
    fits: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, as in JSON."""
        return {
            "name": self.name,
            "placement": self.placement,
            "value": self.value,
            "makespan": self.timeline.makespan,
            "span": self.timeline.span,
            "bubble_rate": self.timeline.bubble_rate,
            "peak_memory": list(self.timeline.peak_memory),
            "fits": self.fits,
            "reason": self.reason or None,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule that was chosen, and the proof of how good it is.

    Attributes:
        schedule: the schedule, compute-only: lower it, run it, or write it.
        timeline: its simulation.
        objective: what was minimised.
        value: what the objective says of the schedule.
        lower_bound: no schedule at any of the placements tried is below this; 0 if none is known.
        bound_reason: what the bound follows from.
        alternatives: everything that was considered, the chosen one first, then the best.
        memory_limit: the memory of each rank.
        recompute: whether each stage recomputes its forward in its backward.
        partition: which layers are in which stage; None if layers were not given.
        interrupted: whether Ctrl-C ended the search early.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    value: float
    lower_bound: float
    bound_reason: str
    alternatives: tuple[Alternative, ...]
    memory_limit: tuple[float, ...]
    recompute: tuple[bool, ...]
    partition: Partition | None = None
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """How far the value is above the bound, as a share of it; 0 if the schedule is proved optimal."""
        return gap_of(self.value, self.lower_bound)

    @property
    def is_optimal(self) -> bool:
        """Whether no schedule at the placements tried can be better."""
        return not self.objective.is_random and self.gap <= 1e-9

    @property
    def costs(self) -> Costs:
        """The costs of the stages."""
        return self.timeline.costs

    def summary(self) -> list[str]:
        """Summarise the plan in words."""
        chosen, timeline = self.alternatives[0], self.timeline
        lines = [f"chosen: {chosen.name}, stages placed {chosen.placement}; {self.objective} {self.value:.6g}"]
        if self.objective.percentile is not None:
            lines.append("no bound is known for percentiles")
        elif self.is_optimal:
            lines.append(f"proved optimal among the placements tried: {self.bound_reason}")
        elif self.objective.is_random:
            lines.append(
                f"the mean of {SAMPLES} samples, {self.gap:.2%} above a bound of the true mean: {self.bound_reason}"
            )
        else:
            lines.append(f"at most {self.gap:.2%} above the optimum of the placements tried: {self.bound_reason}")
        if self.interrupted:
            lines.append("the search was interrupted: this is the best so far")
        fullest = max(range(self.schedule.ranks), key=lambda rank: timeline.peak_memory[rank] - self.memory_limit[rank])
        if math.isfinite(self.memory_limit[fullest]):
            share = timeline.peak_memory[fullest] / self.memory_limit[fullest] if self.memory_limit[fullest] else 1.0
            lines.append(f"rank {fullest} holds {timeline.peak_memory[fullest]:.6g}, {share:.0%} of its limit")
        if any(self.recompute):
            stages = ", ".join(str(stage) for stage, again in enumerate(self.recompute) if again)
            lines.append(f"stages that recompute their forward: {stages}")
        if self.partition is not None:
            lines.append(f"layers per stage: {', '.join(map(str, self.partition.sizes))}")
        lines.append("not modelled: cores, memory bandwidth or links that ranks share")
        return lines

    def describe(self) -> str:
        """Return the summary as text."""
        return "\n".join(self.summary())

    def settings(self, framework: str, *, names: Iterable[Iterable[str]] | None = None) -> Settings:
        """Write the settings with which a framework runs the plan, or what comes nearest to it.

        Args:
            framework: its name: torch, torchtitan, automodel, megatron or primus.
            names: the names of the modules of each stage, such as ``plan.partition.group`` returns.
        """
        from penstock.planning.frameworks.registry import settings_for  # it simulates, which loads the graph

        found = settings_for(
            framework,
            self.schedule,
            self.costs,
            names=names,
            memory_limit=self.memory_limit if any(map(math.isfinite, self.memory_limit)) else None,
        )
        return replace(found, notes=(*found.notes, self._recomputing)) if any(self.recompute) else found

    @property
    def _recomputing(self) -> str:
        stages = ", ".join(str(stage) for stage, again in enumerate(self.recompute) if again)
        return f"stages that recompute their forward: {stages}; turn on activation checkpointing for these, no others"

    def __repr__(self) -> str:
        chosen = self.alternatives[0]
        proved = "optimal" if self.is_optimal else f"gap {self.gap:.2%}" if self.lower_bound else "no bound"
        return f"<Plan: {chosen.name}, {chosen.placement}, {self.objective} {self.value:g}, {proved}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, as in JSON; the schedule is written on its own."""
        return {
            "schedule": self.alternatives[0].name,
            "placement": list(self.schedule.placement.rank_of),
            "ranks": self.schedule.ranks,
            "microbatches": self.schedule.microbatches,
            "objective": str(self.objective),
            "value": self.value,
            "lower_bound": self.lower_bound,
            "bound_reason": self.bound_reason,
            "gap": self.gap if math.isfinite(self.gap) else None,
            "optimal": self.is_optimal,
            "memory_limit": [each if math.isfinite(each) else None for each in self.memory_limit],
            "recompute": list(self.recompute),
            "partition": None if self.partition is None else list(self.partition.sizes),
            "alternatives": [each.to_dict() for each in self.alternatives],
        }
