"""Checks plans: valid, within memory, no worse than any known schedule, not below their bound, the same again."""

import math
import os
import subprocess
import sys
from itertools import count

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CostsError, PlanError
from penstock.ir.placement import Placement
from penstock.planning import planner
from penstock.planning.planner import Progress
from penstock.schedules.registry import RECIPES
from penstock.simulation.period import steady_period
from planning.problems import random_costs, random_problem

QUICK = 0.02


def assert_sound(plan):
    """Check what must hold for every plan."""
    ps.verify(plan.schedule)
    timeline = ps.simulate(plan.schedule, plan.costs)
    values = {"makespan": timeline.makespan, "span": timeline.span, "period": steady_period(plan.schedule, plan.costs)}
    assert plan.value == pytest.approx(values[plan.objective.name])
    assert (np.array(timeline.peak_memory) <= np.array(plan.memory_limit) * (1 + 1e-8)).all()
    assert plan.lower_bound <= plan.value
    assert all(plan.value <= each.value * (1 + 1e-9) for each in plan.alternatives if each.fits)
    assert [each.reason == "" for each in plan.alternatives] == [True] + [False] * (len(plan.alternatives) - 1)


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_are_planned_soundly(seed):
    assert_planned_soundly(seed, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("block", range(20))
def test_many_random_problems_are_planned_soundly(block):
    for seed in range(100 * block, 100 * block + 100):
        assert_planned_soundly(seed, QUICK / 4)


def assert_planned_soundly(seed, effort):
    """Plan a random problem, and check the plan."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    plan = ps.plan(
        problem.costs,
        placement=problem.placement,
        edges=None if problem.is_chain else problem.edges,
        microbatches=problem.microbatches,
        memory_limit=problem.memory_limit,
        split=problem.splits,
        objective=str(rng.choice(["makespan", "span", "period"])),
        effort=effort,
    )
    assert_sound(plan)


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_that_fits_is_better(seed):
    """Whether plain or fitted, with any number of stages per rank."""
    rng = np.random.default_rng(seed)
    ranks, microbatches = int(rng.integers(2, 6)), int(rng.integers(2, 12))
    costs = random_costs(rng, ranks, 1)
    costs = ps.Costs.from_dict({**costs.to_dict(), "latency": 0.2})
    limit = float(rng.uniform(3, 8)) * max(costs.activation) + max(costs.static)
    objective = str(rng.choice(["makespan", "span"]))
    plan = ps.plan(costs, ranks=ranks, microbatches=microbatches, memory_limit=limit, objective=objective, effort=QUICK)
    assert_sound(plan)
    for recipe in RECIPES[1:]:
        for per_rank in (1, 2, 3, 4) if recipe.any_stages else (recipe.stages_per_rank,):
            sizes = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": per_rank}
            plain = ps.build(recipe.name, **sizes)
            of_stages = costs.of_ranks(plain.placement)
            known = [plain]
            if recipe.fits_costs:
                known.append(ps.build(recipe.name, **sizes, costs=of_stages))
            for schedule in known:
                timeline = ps.simulate(schedule, of_stages)
                if max(timeline.peak_memory) <= limit:
                    assert plan.value <= getattr(timeline, objective) * (1 + 1e-9), schedule


def test_equal_arguments_give_equal_plans():
    costs = ps.Costs(forward=[1, 2, 1.5], backward_input=[1.2, 2, 1], latency=0.1)
    first, second = (ps.plan(costs, ranks=3, microbatches=7, memory_limit=2, effort=0.1, seed=5) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.to_dict() == second.to_dict()


def test_the_clock_does_not_decide(monkeypatch):
    """Every look at the clock is an hour later than the one before."""
    hours = count(step=3600.0)
    monkeypatch.setattr(planner, "perf_counter", lambda: next(hours))
    arguments = {"ranks": 4, "microbatches": 6, "memory_limit": 2.5, "effort": 0.1, "seed": 3}
    slow = ps.plan(**arguments, progress=lambda _: None)
    monkeypatch.undo()
    assert slow.to_dict() == ps.plan(**arguments).to_dict()


@pytest.mark.processes
def test_processes_give_equal_plans():
    """Whatever the order of sets is, and whether or not the compiler was loaded before."""
    program = """import penstock as ps
plan = ps.plan(ranks=3, microbatches=7, memory_limit=2, effort=0.05)
print(plan.schedule.grid(), plan.to_dict())"""
    plans = set()
    for hashes, before in (("1", ""), ("2", "import numba\n")):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        plans.add(subprocess.check_output([sys.executable, "-c", before + program], env=environment, text=True))
    assert len(plans) == 1


def test_the_best_known_schedule_is_found_and_proved_optimal():
    plan = ps.plan(ranks=8, microbatches=24, memory_limit=8)
    assert (plan.value, plan.gap, plan.is_optimal) == (73.75, 0.0, True)
    assert plan.alternatives[0].placement == "4 per rank, loop"


def test_memory_beyond_the_known_schedules_is_used():
    plan = ps.plan(ranks=4, microbatches=12, memory_limit=6, stages_per_rank=1, objective="span")
    assert plan.value == pytest.approx(36 * 1 + 1)  # ZB-H1 fits, and takes 39; ZB-H2 would need 7
    assert plan.value < min(each.value for each in plan.alternatives if each.fits and each.name == "ZB-H1")


def test_a_limit_that_nothing_fits_names_the_smallest():
    with pytest.raises(PlanError, match="rank 2 needs at least 3") as raised:
        ps.plan(ps.Costs(activation=[1, 1, 3]), ranks=3, microbatches=4, memory_limit=2.5)
    assert (raised.value.smallest, raised.value.rank) == (3.0, 2)
    assert_sound(ps.plan(ps.Costs(activation=[1, 1, 3]), ranks=3, microbatches=4, memory_limit=3, effort=QUICK))


def test_stages_that_cannot_be_split_are_not():
    plan = ps.plan(ranks=2, microbatches=4, split=False, effort=QUICK)
    assert "I" not in plan.schedule.grid()
    split = next(each for each in plan.alternatives if each.name == "ZB-H1")
    assert (split.fits, split.reason) == (False, "splits backwards that cannot be split")


def test_whole_backwards_are_used_where_they_are_cheaper():
    costs = ps.Costs(backward_input=1, backward_weight=1, backward=1.5)
    plan = ps.plan(costs, ranks=2, microbatches=6, stages_per_rank=1, effort=0.2)
    assert plan.value == pytest.approx(17.0)  # 1F1B takes 17.5; the last I of rank 1 is earlier than its B
    assert "B" in plan.schedule.grid()


def test_recomputation_is_chosen_only_where_memory_needs_it():
    costs = ps.Costs(activation=1, recompute_activation=0.1)
    roomy = ps.plan(costs, ranks=4, microbatches=8, memory_limit=4, recompute=True, effort=QUICK)
    assert not any(roomy.recompute)
    tight = ps.plan(costs, ranks=4, microbatches=8, memory_limit=0.9, recompute=True, effort=QUICK)
    assert any(tight.recompute)
    assert_sound(tight)
    with pytest.raises(PlanError):
        ps.plan(costs, ranks=4, microbatches=8, memory_limit=0.9)
    middle = ps.plan(costs, ranks=4, microbatches=8, memory_limit=2, recompute=True, effort=QUICK)
    assert middle.value <= ps.plan(costs, ranks=4, microbatches=8, memory_limit=2, effort=QUICK).value


def test_recomputation_without_its_costs_is_refused():
    with pytest.raises(CostsError, match="recompute_activation"):
        ps.plan(ranks=2, microbatches=2, recompute=True)


def test_layers_are_cut_into_stages_and_none_is_dropped():
    costs = ps.Costs(forward=[1, 1, 1, 1, 1, 1, 1, 4], latency=0.1, activation=[1] * 8, static=[4, 1, 1, 1, 1, 1, 1, 4])
    plan = ps.plan(costs, ranks=2, microbatches=8, layers=True, effort=QUICK)
    assert_sound(plan)
    assert plan.partition.layers == 8
    assert plan.costs.per_stage("forward", plan.schedule.stages).sum() == 11
    assert len(plan.partition.sizes) == plan.schedule.stages
    tied = ps.plan(costs, ranks=2, microbatches=8, layers=True, together=[(0, 7)], effort=QUICK)
    ends = {tied.schedule.placement.rank_of[stage] for stage in (0, tied.schedule.stages - 1)}
    assert len(ends) == 1


def test_random_times_are_planned_for_their_mean_or_a_percentile():
    mean = ps.plan(ranks=3, microbatches=6, noise=0.2, effort=QUICK)
    assert mean.value > mean.timeline.makespan
    assert 0 < mean.lower_bound <= mean.value
    late = ps.plan(ranks=3, microbatches=6, noise=0.2, stragglers=0.1, percentile=90, effort=QUICK)
    assert late.value > mean.value
    assert math.isinf(late.gap)


def test_progress_reports_the_best_value_and_the_bound():
    seen: list[Progress] = []
    plan = ps.plan(ranks=4, microbatches=9, memory_limit=3, effort=0.1, progress=seen.append)
    assert len(seen) > 5
    assert min(each.best for each in seen) == pytest.approx(plan.value)
    assert all(each.bound <= each.best for each in seen)


def test_an_interruption_returns_the_best_so_far():
    calls = []

    def interrupt(progress):
        calls.append(progress)
        if progress.doing.startswith("searching"):
            raise KeyboardInterrupt

    plan = ps.plan(ranks=4, microbatches=9, memory_limit=3, progress=interrupt)
    assert_sound(plan)
    assert calls[-1].doing.startswith("searching")


def test_an_interruption_among_the_starts_returns_what_was_tried():
    calls = []

    def interrupt(progress):
        calls.append(progress)
        if len(calls) == 3:
            raise KeyboardInterrupt

    plan = ps.plan(ranks=2, microbatches=4, progress=interrupt)
    assert_sound(plan)
    assert plan.lower_bound == 0  # of the other placements nothing is known


@pytest.mark.parametrize(("field", "value"), [("split", "no"), ("memory_limit", True), ("split", [True, False, True])])
def test_values_of_another_kind_are_refused(field, value):
    with pytest.raises(CostsError, match={"split": "True or False"}.get(field, field)):
        ps.plan(placement=Placement.loop(2, 2), microbatches=2, **{field: value})


def test_a_sampled_mean_proves_nothing():
    plan = ps.plan(ranks=1, microbatches=4, noise=0.3, seed=1)
    assert plan.value < plan.lower_bound  # the mean of these samples happens to be low
    assert not plan.is_optimal


def test_a_period_counts_the_optimizer():
    costs = ps.Costs(optimizer=[1, 3], dispatch=0.25)
    plan = ps.plan(costs, ranks=2, microbatches=6, objective="period", stages_per_rank=1, effort=0.1)
    assert_sound(plan)
    seen: list[Progress] = []
    again = ps.plan(
        costs, ranks=2, microbatches=6, objective="period", stages_per_rank=1, effort=0.1, progress=seen.append
    )
    assert again.value == plan.value
    assert all(each.best >= again.lower_bound for each in seen)


def test_an_exact_bound_does_not_exclude_overlaps():
    costs = ps.Costs(dispatch=3)
    plan = ps.plan(costs, placement=Placement.v(2, 4), microbatches=4, exact=5, effort=0.1)
    assert_sound(plan)


def test_values_that_wait_count_against_the_limit():
    costs = ps.Costs(latency=0.5, edge_memory=0.4)
    plan = ps.plan(costs, ranks=3, microbatches=8, memory_limit=3, stages_per_rank=1, effort=QUICK)
    assert_sound(plan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "ranks=8"),
        ({"ranks": 2, "objective": "speed"}, "unknown objective 'speed'; choose one of makespan, span, period"),
        ({"ranks": 2, "effort": 0}, "effort must be above 0"),
        ({"ranks": 2, "edges": []}, "edges are between stages"),
        ({"ranks": 2, "together": [(0, 1)]}, "needs layers="),
        ({"ranks": 3, "placement": Placement.loop(2, 2)}, "the placement has 2"),
        ({"placement": Placement.loop(2, 2), "stages_per_rank": 1}, "omit stages_per_rank"),
        ({"placement": [0, 1]}, "must be a Placement"),
        ({"ranks": 2, "percentile": 90}, "without noise"),
        ({"ranks": 2, "noise": 0.1, "objective": "period"}, "cannot be sampled"),
        ({"ranks": 2, "noise": 0.1, "percentile": 101}, "between 0 and 100"),
        ({"ranks": 2, "noise": 0.1, "percentile": "50"}, "between 0 and 100"),
        ({"ranks": 2, "noise": 0.1, "exact": 1}, "cannot sample random times"),
        ({"ranks": 2, "exact": 0}, "number of seconds"),
        ({"ranks": 2, "split": [True, False]}, "split must be True or False"),
        ({"ranks": 2, "layers": 4, "together": [0, 3]}, "groups of layers"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(PlanError, match=words):
        ps.plan(**{"microbatches": 2, **arguments})
