"""Turns layers into sites: for every placement the best partitions, improved with quick schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PlanError
from penstock.planning.joint import default_starts, improve
from penstock.planning.layers import Partition, count_layers, stage_costs
from penstock.planning.partition import PartitionProblem
from penstock.planning.recomputation import choose_recomputation, quick_value
from penstock.planning.sites import placements, site_of, without_recomputation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.ir.placement import Placement
    from penstock.planning.sites import Site
    from penstock.simulation.costs import Costs

#: How many partitions are compared with quick schedules, for each placement and unit of effort.
EVALUATIONS = 60


def sites_of_layers(
    costs: Costs,
    layers: int | None,
    *,
    ranks: int,
    stages_per_rank: int | None,
    placement: Placement | None,
    together: Iterable[Iterable[int]],
    recompute: bool,
    objective: str,
    effort: float,
    sizes: dict[str, Any],
) -> Iterator[Site]:
    """Yield for every placement the partition that quick schedules like best, the most balanced one and the even one.

    A site of layers has a floor: what no partition goes below.
    """
    layers = count_layers(costs) if layers is None else layers
    allowed = [placement] if placement else list(placements(ranks, stages_per_rank, layers))
    try:
        groups = [tuple(group) for group in together]
    except TypeError:
        raise PlanError(
            f"together must list groups of layers, e.g. [(0, 47)], got {together!r}", field="together", value=together
        ) from None
    refused: list[PlanError] = []
    for place in allowed:
        try:
            yield from _of_placement(costs, layers, place, groups, recompute, objective, effort, sizes)
        except PlanError as error:
            refused.append(error)
    if len(refused) == len(allowed):
        raise min(refused, key=lambda error: error.smallest or 0.0)


def _of_placement(
    costs: Costs,
    layers: int,
    placement: Placement,
    together: list[tuple[int, ...]],
    recompute: bool,
    objective: str,
    effort: float,
    sizes: dict[str, Any],
) -> Iterator[Site]:
    loosest = _with_least_memory(costs, layers) if recompute else without_recomputation(costs)
    limits = {"layers": layers, "memory_limit": sizes["memory_limit"], "together": together}
    problem = PartitionProblem.of(
        loosest, placement, microbatches=sizes["microbatches"], splits=bool(np.all(sizes["splits"])), **limits
    )
    least = _least_times(loosest, layers)
    busiest, is_exact = PartitionProblem.of(least, placement, splits=False, **limits).least_busy()
    if not is_exact:
        busiest = _evenly(least, layers, placement.ranks)
    floor = busiest * sizes["microbatches"]
    if objective == "makespan":
        floor = max(floor, float((least.per_stage("forward", layers) + _inputs(costs, layers)).sum()))

    def site(partition: Partition) -> Site:
        return site_of(stage_costs(without_recomputation(costs), partition), placement, **sizes, partition=partition)

    def worth(partition: Partition) -> tuple[float, ...]:
        here = site(partition)
        values = [quick_value(here.problem, objective)]
        if recompute:
            everywhere = here.with_recomputation([True] * placement.stages, stage_costs(costs, partition))
            values.append(quick_value(everywhere.problem, objective))
        return min(values)

    starts = default_starts(problem)
    found = improve(problem, worth, starts=starts, evaluations=max(len(starts), round(EVALUATIONS * effort)))
    for partition in dict.fromkeys([found.partition, starts[0], starts[-1]]):
        chosen = site(partition)
        if recompute:
            chosen = choose_recomputation(chosen, stage_costs(costs, partition), objective)
        yield replace(chosen, floor=floor)


def _with_least_memory(costs: Costs, layers: int) -> Costs:
    """Return the costs with the memory of recomputing every layer."""
    kept = np.minimum(costs.per_stage("recompute_activation", layers), costs.per_stage("activation", layers))
    return replace(without_recomputation(costs), activation=tuple(kept.tolist()))


def _least_times(costs: Costs, layers: int) -> Costs:
    """Return costs whose F and B are no longer than any way to run them, fused or not, overlapped or not."""
    whole = costs.per_stage("backward", layers)
    halves = costs.per_stage("backward_input", layers) + costs.per_stage("backward_weight", layers)
    share = min(1.0, costs.overlap)
    return replace(
        costs,
        forward=tuple((share * costs.per_stage("forward", layers)).tolist()),
        backward=tuple((share * np.minimum(whole, halves)).tolist()),
    )


def _inputs(costs: Costs, layers: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the least time from the start of a backward to where the layer before can begin its own."""
    inputs = np.minimum(costs.per_stage("backward_input", layers), costs.per_stage("backward", layers))
    return np.asarray(min(1.0, costs.overlap) * inputs)


def _evenly(costs: Costs, layers: int, ranks: int) -> float:
    """Return what the busiest rank has to do at least if the layers are shared evenly, or one is heavy."""
    work = costs.per_stage("forward", layers) + costs.per_stage("backward", layers)
    return float(max(work.sum() / ranks, work.max()))
