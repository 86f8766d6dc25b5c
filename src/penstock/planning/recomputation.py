"""Chooses which stages recompute their forward in their backward: more time, but less memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.planning.evaluator import Evaluator
from penstock.planning.sites import without_recomputation
from penstock.planning.starts import list_starts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.planning.sites import Site
    from penstock.simulation.costs import Costs
    from penstock.simulation.problem import Problem

#: How many stages are reconsidered one by one, at most.
MOST_RECONSIDERED: Final = 64


def choose_recomputation(site: Site, costs: Costs, objective: str) -> Site:
    """Return the site with the stages that should recompute, given costs that say what that takes.

    List scheduling compares the choices: none, all, and those between, first by memory pressure, then stage by stage.
    The relaxed problem of the site has the memory of recomputing everywhere and the time of recomputing nowhere: a
    bound for it holds for every choice.
    """
    stages = site.problem.stages
    kept = np.minimum(costs.per_stage("recompute_activation", stages), costs.per_stage("activation", stages))
    relaxed = replace(site.problem, costs=replace(without_recomputation(costs), activation=tuple(kept.tolist())))
    values: dict[tuple[bool, ...], tuple[float, float]] = {}

    def value(chosen: tuple[bool, ...]) -> tuple[float, float]:
        if chosen not in values:
            values[chosen] = quick_value(site.with_recomputation(chosen, costs).problem, objective)
        return values[chosen]

    best = min(_nested(site.problem), key=value)
    for stage in range(min(stages, MOST_RECONSIDERED)):
        flipped = (*best[:stage], not best[stage], *best[stage + 1 :])
        best = min(best, flipped, key=value)
    return replace(site.with_recomputation(best, costs), relaxed=relaxed)


def quick_value(problem: Problem, objective: str) -> tuple[float, float]:
    """Return the quality of the best list schedule: infinite if none fits."""
    evaluator = Evaluator(problem, objective)
    trials = [evaluator.list(start.origin, start.urgency, start.offset, reserve=True) for start in list_starts(problem)]
    return min((evaluator.quality(trial) for trial in trials if trial is not None), default=(math.inf, math.inf))


def _nested(problem: Problem) -> Iterator[tuple[bool, ...]]:
    """Yield growing sets of stages: first those whose microbatches wait longest for their backward."""
    order = np.argsort(-problem.activation * (problem.stages - np.arange(problem.stages)), kind="stable")
    chosen = np.zeros(problem.stages, bool)
    yield tuple(chosen.tolist())
    for stage in order.tolist():
        chosen[stage] = True
        yield tuple(chosen.tolist())
