"""No schedule is below a bound, and the bounds are tight where the optimum is known."""

import math
import random

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.edges import Edge
from penstock.ir.placement import Placement
from penstock.schedules.registry import RECIPES
from penstock.simulation.bounds import OBJECTIVES, lower_bounds, smallest_memory_limit
from penstock.simulation.costs import Costs
from penstock.simulation.period import steady_period
from penstock.simulation.problem import Problem
from penstock.simulation.simulate import simulate
from random_schedules import random_costs, random_edges, random_placement, random_schedule

TRAINING = [recipe for recipe in RECIPES if recipe.name != "ForwardOnly"]  # which has no backward


def values_of(schedule, costs):
    timeline = simulate(schedule, costs)
    return {"makespan": timeline.makespan, "span": timeline.span, "period": steady_period(schedule, costs)}


def splits_of(schedule, stages):
    """Return which stages run an I somewhere."""
    text = schedule.grid(aligned=False)
    return [f"{stage}I" in text for stage in range(stages)]


def assert_not_below(schedule, costs, splits):
    """Check all bounds against a schedule whose own peaks are the limits."""
    limits = simulate(schedule, costs).peak_memory
    problem = Problem.of(
        costs,
        schedule.placement,
        microbatches=schedule.microbatches,
        memory_limit=limits,
        splits=splits,
        edges=schedule.edges,
    )
    for objective, value in values_of(schedule, costs).items():
        for bound in lower_bounds(problem, objective).found:
            assert bound.value <= value * (1 + 1e-9) + 1e-9, (objective, bound, schedule.grid(aligned=False), costs)
    assert np.all(np.array(smallest_memory_limit(problem).of_ranks) <= np.array(limits) * (1 + 1e-9) + 1e-9)


@pytest.mark.parametrize("recipe", TRAINING, ids=lambda recipe: recipe.name)
def test_no_recipe_is_below_a_bound(recipe):
    chance = random.Random(recipe.name)
    for _ in range(40):
        ranks, microbatches = chance.randint(1, 5), chance.randint(1, 9)
        stages = chance.choice([1, 2, 3]) if recipe.any_stages else None
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
        costs = random_costs(chance, schedule.stages, len(schedule.edges))
        splits = any("I" in str(action) for row in schedule.actions for action in row)
        for allowed in {splits, True}:
            assert_not_below(schedule, costs, allowed)


@pytest.mark.parametrize("seed", range(8))
def test_no_random_schedule_is_below_a_bound(seed):
    chance = random.Random(seed)
    for _ in range(60):
        placement = random_placement(chance, chance.randint(1, 4))
        edges = random_edges(chance, placement.stages)
        splits = [chance.random() < 0.8 for _ in range(placement.stages)]
        schedule = random_schedule(chance, placement, chance.randint(1, 6), edges, splits)
        assert_not_below(schedule, random_costs(chance, placement.stages, len(edges)), splits)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 24)])
@pytest.mark.parametrize(("forward", "inward", "weight"), [(1, 1, 1), (4, 4, 2), (3, 2, 1)])
def test_one_stage_per_rank_with_memory_for_one_microbatch_per_rank_is_solved(
    ranks, microbatches, forward, inward, weight
):
    costs = Costs(forward=forward, backward_input=inward, backward_weight=weight)
    placement = Placement.loop(ranks, ranks)
    split = Problem.of(costs, placement, microbatches=microbatches, memory_limit=ranks)
    ideal = microbatches * (forward + inward + weight)
    assert lower_bounds(split).best == pytest.approx(ideal + (ranks - 1) * (forward + inward - weight))
    fused = Problem.of(costs, placement, microbatches=microbatches, splits=False)
    assert lower_bounds(fused).best == ideal + (ranks - 1) * (forward + inward + weight)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_v_with_full_memory_is_solved(ranks):
    problem = Problem.of(Costs(), Placement.v(ranks, 2 * ranks), microbatches=2 * ranks, memory_limit=2 * ranks)
    ideal = 2 * ranks * 6
    assert lower_bounds(problem, "span").best == ideal
    assert lower_bounds(problem, "makespan").best == ideal + ranks - 1


def test_the_reason_names_the_rank_that_binds():
    costs = Costs(forward=[1, 1, 5, 1], backward_input=1, backward_weight=1)
    bounds = lower_bounds(Problem.of(costs, Placement.loop(4, 4), microbatches=8))
    assert bounds.best == bounds["work"] == 2 + 8 * 7
    assert bounds.rank == 2
    assert bounds.reason == "makespan is at least 58: rank 2 has that much work, and waits before and after it"


def test_too_little_memory_is_infinite_time():
    problem = Problem.of(Costs(static=[0, 0, 2, 0]), Placement.v(2, 4), microbatches=4, memory_limit=[2, 3.5])
    for objective in OBJECTIVES:
        bounds = lower_bounds(problem, objective)
        assert bounds.best == math.inf
        assert bounds.reason == "no schedule fits into the memory of rank 1, which needs at least 4"
    assert smallest_memory_limit(problem).of_ranks == (2, 4)
    assert math.isfinite(
        lower_bounds(Problem.of(problem.costs, problem.placement, microbatches=4, memory_limit=4)).best
    )


def test_stages_that_do_not_wait_for_each_other_need_no_memory_at_once():
    edges = [Edge(0, (1, 2)), Edge(1, (3,)), Edge(2, (3,))]
    problem = Problem.of(Costs(), Placement((1, 0, 0, 1), 2), microbatches=2, edges=edges)
    assert smallest_memory_limit(problem).of_ranks == (1, 2)


def test_ranks_without_stages_take_no_time():
    nothing = Problem.of(Costs(), Placement.loop(2, 0), microbatches=3, memory_limit=5)
    assert [lower_bounds(nothing, objective).best for objective in OBJECTIVES] == [0, 0, 0]
    problem = Problem.of(Costs(), Placement((1, 1), 4), microbatches=3, memory_limit=5)
    for objective in OBJECTIVES:
        bounds = lower_bounds(problem, objective)
        assert bounds.best == 18
        assert bounds.rank == 1


def test_an_unknown_objective_is_named():
    with pytest.raises(ScheduleError, match="'spam'"):
        lower_bounds(Problem.of(Costs(), Placement.loop(1, 1), microbatches=1), "spam")
