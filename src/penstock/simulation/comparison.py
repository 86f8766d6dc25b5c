"""Compares every known schedule at one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.errors import CostsError, SizeError
from penstock.schedules.registry import RECIPES, build
from penstock.simulation.costs import Costs
from penstock.simulation.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.comm_model import CommModel
    from penstock.ir.schedule import Schedule
    from penstock.simulation.timeline import Timeline


#: The tolerance of limits, as a share: three times 0.1 is not quite 0.3.
ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule in a comparison.

    Attributes:
        name: the name of the schedule.
        stages_per_rank: the number of stages per rank.
        timeline: the simulation; None if the schedule is impossible at this size or with these costs.
        reason: why it is ruled out; empty if it is not.
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
    """Yield every schedule that trains, one after the other as it is simulated.

    Costs are those of whole ranks, see ``Costs.of_ranks``, so that schedules with different numbers of stages per rank
    are comparable. A schedule that can be improved for these costs appears twice, plain and fitted.

    >>> fastest = min(candidates(4, 8), key=lambda candidate: candidate.timeline.makespan)
    >>> fastest.name, fastest.timeline.makespan
    ('InterleavedZeroBubble', 25.5)
    """
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise CostsError(f"costs must be Costs, e.g. Costs(forward=1, backward_input=1), got {costs!r}")
    if memory_limit is not None and not 0 <= memory_limit < float("inf"):
        raise SizeError(
            f"memory_limit must be a finite number, at least 0, got {memory_limit!r}",
            field="memory_limit",
            value=memory_limit,
        )
    for recipe in RECIPES:
        if recipe.name != "ForwardOnly":
            parts = stages_per_rank if stages_per_rank is not None and recipe.any_stages else recipe.stages_per_rank
            plain = build(recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=parts)
            found = _candidate(plain, costs, parts, memory_limit, model)
            yield found
            if recipe.fits_costs and not found.reason:
                shared = costs.of_ranks(plain.placement)
                fitted = build(recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=parts, costs=shared)
                if fitted != plain:
                    yield _candidate(fitted, costs, parts, memory_limit, model)


def _candidate(
    schedule: Schedule, costs: Costs, parts: int, memory_limit: float | None, model: CommModel | None
) -> Candidate:
    name = str(schedule.metadata["name"])
    try:
        timeline = simulate(schedule, costs.of_ranks(schedule.placement), model=model)
        found = Candidate(name, parts, timeline)
        peak = found.peak_memory
    except CostsError as error:
        return Candidate(name, parts, None, str(error))
    if memory_limit is not None and peak > memory_limit * (1 + ROUNDING):
        rank = timeline.peak_memory.index(peak)
        return Candidate(name, parts, timeline, f"rank {rank} holds {peak:g}, but the limit is {memory_limit:g}")
    return found


def rank_candidates(found: list[Candidate]) -> list[Candidate]:
    """Sort by makespan and then by memory, the best first; what is ruled out comes last."""

    def order(candidate: Candidate) -> tuple[bool, float, float]:
        time = candidate.timeline.makespan if candidate.timeline else float("inf")
        return bool(candidate.reason), float(f"{time:.9g}"), float(f"{candidate.peak_memory:.9g}")

    return sorted(found, key=order)
