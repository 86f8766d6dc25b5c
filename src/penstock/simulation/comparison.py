"""Every known schedule at one size, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import CostsError, SizeError
from penstock.schedules.registry import RECIPES, build
from penstock.simulation.costs import Costs
from penstock.simulation.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.models import CommModel
    from penstock.schedules.registry import Recipe
    from penstock.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule in a comparison.

    Attributes:
        name: the schedule.
        stages_per_rank: how many stages each rank has in it.
        timeline: what it takes; None if it cannot be had at this size or with these costs.
        reason: why it is out of the question; nothing if it is not.
    """

    name: str
    stages_per_rank: int
    timeline: Timeline | None
    reason: str = ""

    @property
    def peak_memory(self) -> float:
        """The most that any rank holds."""
        return max(self.timeline.peak_memory) if self.timeline else 0.0


def candidates(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    stages_per_rank: int | None = None,
    memory_limit: float | None = None,
    model: CommModel | None = None,
) -> Iterator[Candidate]:
    """Every schedule that trains, one after the other as it is simulated.

    Costs are those of a whole rank: its stages share them equally, however many a schedule gives it.

    >>> fastest = min(candidates(4, 8), key=lambda candidate: candidate.timeline.makespan)
    >>> fastest.name, fastest.timeline.makespan
    ('InterleavedZeroBubble', 25.5)
    """
    for recipe in RECIPES:
        if recipe.name != "ForwardOnly":
            parts = stages_per_rank if stages_per_rank is not None and recipe.any_stages else recipe.stages_per_rank
            yield _candidate(recipe, ranks, microbatches, (costs or Costs()), parts, memory_limit, model)


def _candidate(
    recipe: Recipe,
    ranks: int,
    microbatches: int,
    costs: Costs,
    parts: int,
    memory_limit: float | None,
    model: CommModel | None,
) -> Candidate:
    schedule = build(recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=parts)
    try:
        timeline = simulate(schedule, costs.shared(parts), model=model)
        found = Candidate(recipe.name, parts, timeline)
        peak = found.peak_memory
    except (CostsError, SizeError) as error:
        return Candidate(recipe.name, parts, None, str(error))
    if memory_limit is not None and peak > memory_limit:
        rank = timeline.peak_memory.index(peak)
        return Candidate(recipe.name, parts, timeline, f"rank {rank} holds {peak:g}, and {memory_limit:g} is the limit")
    return found


def ranked(found: list[Candidate]) -> list[Candidate]:
    """The fastest first, by makespan and then by memory; what is out of the question last."""

    def order(candidate: Candidate) -> tuple[bool, float, float]:
        time = candidate.timeline.makespan if candidate.timeline else float("inf")
        return bool(candidate.reason), time, candidate.peak_memory

    return sorted(found, key=order)
