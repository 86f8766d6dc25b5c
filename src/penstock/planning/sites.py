"""Enumerates where a schedule could run: placements, with the costs of the stages there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.errors import CostsError, SizeError
from penstock.ir.numbers import whole_number
from penstock.ir.placement import Placement
from penstock.planning.refit import refit
from penstock.schedules.registry import RECIPES, build
from penstock.simulation.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.ir.edges import Edge
    from penstock.ir.schedule import Schedule
    from penstock.planning.layers import Partition
    from penstock.simulation.costs import Costs

#: The most stages per rank that are tried by default.
MOST_STAGES_PER_RANK: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A problem to search, and how it came to be.

    Attributes:
        problem: the stages, their costs and limits.
        relaxed: a problem that bounds every choice of what to recompute; the same if there is no choice.
        recompute: whether each stage recomputes its forward in its backward.
        partition: which layers are in which stage, if layers were given.
        floor: what no partition goes below, if layers were given.
    """

    problem: Problem
    relaxed: Problem
    recompute: tuple[bool, ...]
    partition: Partition | None = None
    floor: float | None = None

    @property
    def name(self) -> str:
        """The placement in words."""
        return describe_placement(self.problem.placement)

    @property
    def stages_per_rank(self) -> float:
        """The number of stages per rank, on average."""
        return self.problem.stages / self.problem.ranks

    def with_recomputation(self, stages: Sequence[bool], costs: Costs) -> Site:
        """Return the site if these stages recompute their forward, given the costs that say what that takes."""
        changed = replace(self.problem, costs=costs.with_recomputation(stages))
        return replace(self, problem=changed, recompute=tuple(map(bool, stages)))


def describe_placement(placement: Placement) -> str:
    """Return a placement in words.

    >>> describe_placement(Placement.v(2, 4))
    '2 per rank, V'
    """
    per_rank, rest = divmod(placement.stages, placement.ranks)
    words = f"{per_rank} per rank"
    if rest == 0 and placement == Placement.loop(placement.ranks, placement.stages):
        return words if per_rank == 1 else f"{words}, loop"
    if rest == 0 and placement == Placement.v(placement.ranks, placement.stages):
        return f"{words}, V"
    return f"{placement.stages} stages on {placement.ranks} rank{'s' * (placement.ranks != 1)}"


def placements(ranks: int, stages_per_rank: int | None, most_stages: int | None = None) -> Iterator[Placement]:
    """Yield the placements to try: loops, and a V if there are two stages per rank."""
    ranks = whole_number("ranks", ranks, least=1)
    counts: Sequence[int] = range(1, MOST_STAGES_PER_RANK + 1)
    if stages_per_rank is not None:
        counts = (whole_number("stages_per_rank", stages_per_rank, least=1),)
    if most_stages is not None and counts[0] * ranks > most_stages:
        raise SizeError(
            f"{counts[0] * ranks} stages on {ranks} ranks are more than the {most_stages} layers; use fewer ranks or "
            f"stages per rank",
            field="stages_per_rank" if stages_per_rank is not None else "ranks",
            value=stages_per_rank if stages_per_rank is not None else ranks,
        )
    for count in counts:
        if most_stages is None or count * ranks <= most_stages:
            yield Placement.loop(ranks, count * ranks)
            if count == 2 and ranks > 1:
                yield Placement.v(ranks, count * ranks)


def site_of(
    costs: Costs,
    placement: Placement,
    *,
    microbatches: int,
    memory_limit: float | Sequence[float] | None,
    splits: bool | Sequence[bool],
    edges: Sequence[Edge] | None = None,
    partition: Partition | None = None,
) -> Site:
    """Return the site for these costs of stages, where no stage recomputes anything yet."""
    sizes = {"microbatches": microbatches, "memory_limit": memory_limit, "splits": splits, "edges": edges}
    nothing = (False,) * placement.stages
    problem = Problem.of(without_recomputation(costs), placement, **sizes)  # type: ignore[arg-type]
    return Site(problem, problem, nothing, partition)


def without_recomputation(costs: Costs) -> Costs:
    """Return the costs without what recomputing would cost."""
    kept = {name: value for name, value in costs.to_dict().items() if not name.startswith("recompute")}
    return type(costs).from_dict(kept)


def known_schedules(problem: Problem) -> Iterator[Schedule]:
    """Yield every schedule with a name that trains on this placement."""
    if not problem.is_chain:
        wired = problem.edges
    for recipe in RECIPES:
        if recipe.name == "ForwardOnly" or problem.stages % problem.ranks:
            continue
        per_rank = problem.stages // problem.ranks
        if not recipe.any_stages and per_rank != recipe.stages_per_rank:
            continue
        chosen = per_rank if recipe.any_stages else None
        try:
            schedule = build(
                recipe.name, ranks=problem.ranks, microbatches=problem.microbatches, stages_per_rank=chosen
            )
        except (SizeError, CostsError):
            continue
        if schedule.placement == problem.placement:
            yield schedule if problem.is_chain else schedule.with_edges(wired)


def fitted(schedules: Iterable[Schedule], problem: Problem) -> list[Schedule]:
    """Return those schedules that split the backward again, with their W placed for these costs, where that helps."""
    if not problem.is_chain:
        return []
    able = {recipe.name for recipe in RECIPES if recipe.fits_costs}
    found = [(each, refit(each, problem.costs)) for each in schedules if each.metadata["name"] in able]
    return [again for plain, again in found if again != plain]
