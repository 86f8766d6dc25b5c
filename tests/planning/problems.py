"""Draws random planning problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.edges import Edge
from penstock.ir.placement import Placement
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem

if TYPE_CHECKING:
    from numpy.random import Generator


def random_placement(rng: Generator, most_ranks: int = 4) -> Placement:
    """Return a loop, a V, or stages anywhere."""
    ranks = int(rng.integers(1, most_ranks + 1))
    choice = rng.integers(4)
    if choice == 0:
        return Placement.loop(ranks, ranks)
    if choice == 1:
        return Placement.loop(ranks, ranks * int(rng.integers(2, 4)))
    if choice == 2:
        return Placement.v(ranks, 2 * ranks)
    return Placement(tuple(rng.integers(0, ranks, int(rng.integers(1, 7))).tolist()), ranks)


def random_costs(rng: Generator, stages: int, edges: int | None = None) -> Costs:
    """Return costs, mostly unequal, often with latency, dispatch and a memory that I releases in part."""

    def of_stages(low: float, high: float) -> np.ndarray:
        drawn = rng.uniform(low, high, stages) if rng.random() < 0.5 else rng.integers(1, 5, stages)
        return np.asarray(drawn, float)

    edges = max(stages - 1, 0) if edges is None else edges
    costs = {
        "forward": of_stages(0.5, 2),
        "backward_input": of_stages(0.5, 2),
        "backward_weight": of_stages(0.1, 2),
        "activation": of_stages(0.5, 2),
        "latency": rng.uniform(0, 1, edges) * (rng.random() < 0.5),
        "dispatch": 0.1 * (rng.random() < 0.3),
        "input_release": float(rng.choice([0.0, 0.4, 1.0])),
        "static": of_stages(0, 1),
    }
    if rng.random() < 0.3:
        costs["backward"] = (costs["backward_input"] + costs["backward_weight"]) * rng.uniform(0.7, 1.1)
    return Costs(**costs)


def random_edges(rng: Generator, stages: int) -> list[Edge] | None:
    """Return a chain, or a chain with skips, of which some have no gradient."""
    if stages < 3 or rng.random() < 0.6:
        return None
    found = [Edge(stage, (stage + 1,)) for stage in range(stages - 1)]
    for _ in range(int(rng.integers(1, 3))):
        source = int(rng.integers(0, stages - 2))
        target = int(rng.integers(source + 2, stages))
        found.append(Edge(source, (target,), f"skip{len(found)}", gradient=bool(rng.random() < 0.7)))
    return found


def random_problem(rng: Generator, *, most_ranks: int = 4, most_microbatches: int = 8, tight: bool = True) -> Problem:
    """Return a problem that has a solution."""
    placement = random_placement(rng, most_ranks)
    stages = placement.stages
    edges = random_edges(rng, stages)
    costs = random_costs(rng, stages, None if edges is None else len(edges))
    microbatches = int(rng.integers(1, most_microbatches + 1))
    splits = rng.random(stages) < 0.8 if rng.random() < 0.3 else True
    least = np.bincount(placement.rank_of, costs.per_stage("activation", stages), placement.ranks)
    static = np.bincount(placement.rank_of, costs.per_stage("static", stages), placement.ranks)
    limit = None
    if tight and rng.random() < 0.8:
        limit = static + least * rng.uniform(1.0, placement.ranks + 1.0)
    return Problem.of(costs, placement, microbatches=microbatches, memory_limit=limit, splits=splits, edges=edges)
