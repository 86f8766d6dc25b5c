"""Chooses a schedule for given costs under a memory limit, and says how close to optimal it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import CostsError, PlanError
from penstock.ir.numbers import whole_number
from penstock.ir.placement import Placement
from penstock.planning.exact import INSTALL, is_available
from penstock.planning.layer_sites import sites_of_layers
from penstock.planning.objective import Objective
from penstock.planning.planner import Planner, Progress
from penstock.planning.recomputation import choose_recomputation
from penstock.planning.result import Alternative, Plan
from penstock.planning.sites import Site, placements, site_of
from penstock.simulation.bounds import smallest_memory_limit
from penstock.simulation.costs import Costs
from penstock.verification.check import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.ir.edges import Edge
    from penstock.planning.planner import Candidate

#: More effort than this would take days.
MOST_EFFORT: Final = 1e5


def plan(
    costs: Costs | None = None,
    *,
    ranks: int | None = None,
    microbatches: int,
    memory_limit: float | Sequence[float] | None = None,
    objective: str = "makespan",
    effort: float = 1.0,
    seed: int = 0,
    placement: Placement | None = None,
    stages_per_rank: int | None = None,
    edges: Sequence[Edge] | None = None,
    layers: int | bool | None = None,
    together: Iterable[Iterable[int]] = (),
    split: bool | Sequence[bool] = True,
    recompute: bool = False,
    noise: float = 0.0,
    stragglers: float | Sequence[float] = 0.0,
    percentile: float | None = None,
    exact: float | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Plan:
    """Choose the best schedule for these costs, and prove how good it is.

    Args:
        costs: what actions cost. With ``placement``, of its stages; otherwise of whole ranks, whose stages share them
            equally (see ``Costs.of_ranks``). By default F, I and W of a rank take 1.
        ranks: the number of ranks.
        microbatches: the number of microbatches of a step.
        memory_limit: the memory of each rank, static memory included, in the unit of the costs.
        objective: ``"makespan"``, ``"span"``, or ``"period"``: the time per step without a barrier between steps.
        effort: how much to search: with 1 a second or two for 8 ranks and 64 microbatches.
        seed: that of the search. Equal arguments give equal plans, on any machine with the same extras, unless the time
            for the exact solver ends.
        placement: where the stages are; by default several are tried.
        stages_per_rank: the number of stages per rank; by default 1 to 4 are tried.
        layers: the number of layers, if costs are those of layers, which are then cut into stages; True if that number
            follows from the costs.
        together: groups of layers that one rank must hold, such as an embedding and a head with tied weights.
        edges: which values go from which stage to which, with ``placement``; by default a chain.
        split: whether backwards may be split into I and W; one for all, or with ``placement`` one per stage.
        recompute: whether stages may recompute their forward in their backward, if the costs say what that takes.
        noise: how much the times of actions vary at random; the plan is then best on average.
        stragglers: how much the speeds of ranks vary at random.
        percentile: of the sampled times, instead of their mean.
        exact: seconds for the exact solver, which needs the extra ``penstock[exact]``. With the extra, problems of up
            to about 100 actions are always solved exactly; with time for it, larger ones are, too, or improved piece by
            piece. How far that gets depends on the machine.
        progress: called with a ``Progress`` now and then.

    >>> chosen = plan(ranks=4, microbatches=8, memory_limit=4, stages_per_rank=1)
    >>> chosen.value, chosen.lower_bound, chosen.gap
    (27.0, 27.0, 0.0)

    Raises:
        PlanError: nothing fits the memory limit; the error says what would.
    """
    goal = Objective(objective, noise, stragglers, percentile, whole_number("seed", seed, most=2**31 - 1))
    _check_options(effort, exact, split, goal, has_stages=placement is not None)
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise CostsError(f"costs must be Costs, e.g. Costs(forward=1, backward_input=1), got {costs!r}")
    sizes: dict[str, Any] = {"microbatches": microbatches, "memory_limit": memory_limit, "splits": split}
    if layers is not None and layers is not False:
        if edges is not None:
            raise PlanError("layers are a chain; omit edges, or pass the costs of stages", field="edges")
        if placement is not None:
            _check_placement(placement, ranks, stages_per_rank)
        sites = list(
            sites_of_layers(
                costs,
                None if layers is True else layers,
                ranks=_checked_ranks(ranks if placement is None else placement.ranks),
                stages_per_rank=stages_per_rank,
                placement=placement,
                together=together,
                recompute=recompute,
                objective=goal.name,
                effort=float(effort),
                sizes=sizes,
            )
        )
        return _search(sites, goal, memory_limit, effort=float(effort), seed=seed, seconds=exact, report=progress)
    if tuple(together):
        raise PlanError("together= lists layers, so it needs layers=, too", field="together")
    if placement is None:
        found = list(_sites_of_ranks(costs, ranks, stages_per_rank, edges, sizes))
    else:
        _check_placement(placement, ranks, stages_per_rank)
        found = [(site_of(costs, placement, **sizes, edges=edges), costs)]
    if recompute:
        found = [(choose_recomputation(site, of_stages, goal.name), of_stages) for site, of_stages in found]
    return _search(
        [site for site, _ in found], goal, memory_limit, effort=float(effort), seed=seed, seconds=exact, report=progress
    )


def _search(
    sites: Sequence[Site],
    objective: Objective,
    memory_limit: object,
    *,
    effort: float,
    seed: int,
    seconds: float | None,
    report: Callable[[Progress], object] | None,
) -> Plan:
    """Search all sites; an interruption returns the best so far."""
    _refuse_impossible(sites, memory_limit)
    planner = Planner(sites, objective, effort=effort, seed=seed, seconds=seconds, report=report)
    interrupted = False
    try:
        planner.start()
        planner.search()
    except KeyboardInterrupt:
        if not math.isfinite(planner.best):
            raise  # there is nothing to return yet
        interrupted = True
    return replace(_plan_of(planner), interrupted=interrupted)


def _sites_of_ranks(
    costs: Costs,
    ranks: int | None,
    stages_per_rank: int | None,
    edges: Sequence[Edge] | None,
    sizes: dict[str, Any],
) -> Iterator[tuple[Site, Costs]]:
    """Yield every placement that these costs of ranks allow, with the costs of its stages."""
    if edges is not None:
        raise PlanError("edges are between stages, so they need placement=, too", field="edges")
    ranks = _checked_ranks(ranks)
    refused: list[CostsError] = []
    found = 0
    for place in placements(ranks, stages_per_rank):
        of_stages = costs.of_ranks(place)
        try:
            site = site_of(of_stages, place, **sizes)
        except CostsError as error:  # e.g. latencies for another number of edges
            refused.append(error)
            continue
        found += 1
        yield site, of_stages
    if not found:
        raise refused[0]


def _check_options(effort: object, exact: object, split: object, objective: Objective, *, has_stages: bool) -> None:
    if not isinstance(effort, (int, float)) or not 0 < effort <= MOST_EFFORT:
        raise PlanError(f"effort must be above 0 and at most {MOST_EFFORT:g}, got {effort!r}", field="effort")
    if exact is not None:
        _check_exact(exact, objective)
    if not isinstance(split, bool) and not has_stages:
        raise PlanError(f"split must be True or False unless placement= is given, got {split!r}", field="split")


def _check_exact(seconds: object, objective: Objective) -> None:
    if objective.is_random:
        raise PlanError("exact search cannot sample random times; omit exact, or noise and stragglers", field="exact")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise PlanError(f"exact must be a number of seconds, got {seconds!r}", field="exact", value=seconds)
    if not is_available():
        raise PlanError(f"exact search needs OR-tools, which is not installed: {INSTALL}", field="exact")


def _checked_ranks(ranks: int | None) -> int:
    if ranks is None:
        raise PlanError("say for how many ranks to plan, e.g. ranks=8", field="ranks")
    return whole_number("ranks", ranks, least=1)


def _check_placement(placement: Placement, ranks: int | None, stages_per_rank: int | None) -> None:
    if not isinstance(placement, Placement):
        raise PlanError(f"placement must be a Placement, e.g. schedule.placement, got {placement!r}", field="placement")
    if ranks not in (None, placement.ranks):
        raise PlanError(f"ranks={ranks}, but the placement has {placement.ranks}; omit ranks", field="ranks")
    if stages_per_rank is not None:
        raise PlanError("the placement already says how many stages a rank has; omit stages_per_rank",
                        field="stages_per_rank")  # fmt: skip


def _refuse_impossible(sites: Sequence[Site], memory_limit: object) -> None:
    """Raise an error that names the smallest possible limit if no site has a schedule."""
    needs = [smallest_memory_limit(site.relaxed) for site in sites]
    if any(
        (np.array(need.of_ranks) <= site.relaxed.memory_limit * (1 + 1e-9)).all()
        for need, site in zip(needs, sites, strict=True)
    ):
        return
    # Values that wait are not counted, and with skips a schedule may need more.
    sure = all(site.problem.is_chain and not np.any(site.problem.costs.edge_memory) for site in sites)
    need, site = min(zip(needs, sites, strict=True), key=lambda each: each[0].single)
    enough = f"; a limit of {need.single:g} for every rank is enough" if sure else ""
    raise PlanError(
        f"nothing fits memory_limit={memory_limit}: with the placement '{site.name}', rank {need.rank} needs at least "
        f"{need.of_ranks[need.rank]:g} for its static memory and one activation of each of its stages, and no "
        f"placement that was tried needs less{enough}",
        field="memory_limit",
        value=memory_limit,
        smallest=need.single,
        rank=need.rank,
    )


def _plan_of(planner: Planner) -> Plan:
    """Choose among all candidates, and say of the others why they were not chosen."""
    candidates = planner.candidates()
    able = [each for each in candidates if each.excess is None and each.may_split]
    if not able:
        raise PlanError(
            "no schedule was found that fits the memory limit, although none was proved impossible; raise the limit, "
            "or search with more effort",
            field="memory_limit",
        )
    best = min(able, key=lambda each: each.quality)
    verify(best.timeline.schedule)
    others = [each for each in candidates if each is not best]
    others.sort(key=lambda each: (each not in able, each.quality))
    alternatives = [
        Alternative(
            each.name,
            each.site.name,
            each.timeline,
            each.value,
            each in able,
            "" if each is best else _why_not(each, best),
        )
        for each in [best, *others]
    ]
    lowest = min(planner.proofs(), key=lambda bounds: bounds.best)
    problem = best.site.problem
    if best.value < planner.bound * (1 - 1e-8) and not planner.objective.is_random:
        raise AssertionError(f"a bug in penstock: {best.value} is below the bound {planner.bound}: {lowest.reason}")
    return Plan(
        schedule=best.timeline.schedule,
        timeline=best.timeline,
        objective=planner.objective,
        value=best.value,
        lower_bound=planner.bound if planner.objective.is_random else min(planner.bound, best.value),
        bound_reason=lowest.reason if planner.bound else "",
        alternatives=tuple(alternatives),
        memory_limit=tuple(problem.memory_limit.tolist()),
        recompute=best.site.recompute,
        partition=best.site.partition,
    )


def _why_not(candidate: Candidate, best: Candidate) -> str:
    if not candidate.may_split:
        return "splits backwards that cannot be split"
    if candidate.excess is not None:
        excess, rank = candidate.excess
        limit = candidate.site.problem.memory_limit[rank]
        return f"rank {rank} holds {limit + excess:.6g} of {limit:.6g}"
    slower = candidate.value / best.value - 1 if best.value else 0.0
    return f"+{slower:.1%}" if slower > 1e-9 else "as good"
