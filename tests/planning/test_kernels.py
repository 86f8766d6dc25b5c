"""Checks the kernels against the simulator, which shares no code with them."""

import numpy as np
import pytest

from penstock.ir.placement import Placement
from penstock.planning.instance import instance_of
from penstock.planning.kernels.list_schedule import schedule, tune
from penstock.planning.kernels.replay import anneal, run, scratch
from penstock.planning.orders import KINDS, B, Order, W
from penstock.schedules.registry import RECIPES
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem
from penstock.simulation.simulate import simulate
from penstock.verification.check import verify
from planning.problems import random_problem

MAKESPAN = np.array([1.0, 0.0])


def replay(problem, order, *, fill=False, patience=0.5):
    """Return the values of a run, the order with W, and the peak memory."""
    case = instance_of(problem)
    made = scratch(problem.stages, problem.microbatches, problem.ranks, len(order.tokens))
    values = run(case, order.first, order.tokens, np.full((problem.ranks, 2), patience), fill, made)
    rows = [made.ran[2 * begin : end] for begin, end in zip(order.first[:-1], made.ran_to, strict=True)]
    return values, Order.from_rows(rows), made.peak + problem.static


def by_number(problem):
    """Return the urgencies of microbatches in turn."""
    return np.broadcast_to(
        np.arange(problem.microbatches, dtype=float), (2, problem.stages, problem.microbatches)
    ).copy()


def list_scheduled(problem, *, alpha=1.0, patience=0.5, reserve=True):
    """Return the values of list scheduling, and the order."""
    count = 2 * problem.microbatches * np.bincount(problem.rank_of, minlength=problem.ranks)
    first = np.append(0, np.cumsum(count)).astype(np.int64)
    tokens = np.zeros(first[-1], np.int32)
    offset = np.zeros((problem.stages, 2))
    offset[:, 1] = alpha * (problem.stages - np.arange(problem.stages)) * problem.ranks / problem.stages
    sizes = np.full((problem.ranks, 2), patience), np.full(problem.ranks, 0.25)
    return schedule(instance_of(problem), first, by_number(problem), offset, *sizes, reserve, tokens), Order(
        first, tokens
    )


def assert_like_simulate(problem, order, values, peak=None):
    made = order.to_schedule(problem, "drawn")
    verify(made)
    timeline = simulate(made, problem.costs)
    assert values[:2] == pytest.approx((timeline.makespan, timeline.span), rel=1e-9)
    if peak is not None:
        assert peak == pytest.approx(timeline.peak_memory, rel=1e-9)
    assert (np.array(timeline.peak_memory) <= problem.memory_limit * (1 + 1e-8)).all()


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.name not in ("ForwardOnly", "LoopedBFS")])
def test_every_recipe_runs_as_in_the_simulator(recipe):
    plain = recipe.generate(3, 7)
    rng = np.random.default_rng(recipe.name.encode()[0])
    fields = ("forward", "backward_input", "backward_weight", "activation")
    costs = Costs(**{field: rng.uniform(1, 2, plain.stages) for field in fields}, latency=0.3, input_release=0.25)
    problem = Problem.of(costs, plain.placement, microbatches=7)
    values, order, peak = replay(problem, Order.from_schedule(plain))
    assert_like_simulate(problem, order, values, peak)


@pytest.mark.parametrize("seed", range(60))
def test_what_the_kernels_build_runs_as_in_the_simulator(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    values, order = list_scheduled(problem, alpha=rng.uniform(0.2, 2), patience=rng.uniform(0, 1.2))
    assert np.isfinite(values[0]), "room for one activation of each stage suffices"
    filled, ran, peak = replay(problem, order, fill=True)
    assert_like_simulate(problem, ran, filled, peak)
    again, same, _ = replay(problem, ran)
    assert again == pytest.approx(filled)
    assert same.tokens.tolist() == ran.tokens.tolist()

    case = instance_of(problem)
    patience = np.full((problem.ranks, 2), 0.5)
    made = scratch(problem.stages, problem.microbatches, problem.ranks, len(order.tokens))
    start = case, order.first, order.tokens, patience
    tokens, patience, _ = anneal(*start, True, MAKESPAN, -np.inf, 300, 0.5, seed, made)
    values = run(case, order.first, tokens, patience, True, made)
    assert values[0] + 0.01 * values[2] <= filled[0] + 0.01 * filled[2] + 1e-9
    rows = [made.ran[2 * begin : end] for begin, end in zip(order.first[:-1], made.ran_to, strict=True)]
    assert_like_simulate(problem, Order.from_rows(rows), values, made.peak + problem.static)


@pytest.mark.parametrize("seed", range(20))
def test_moving_w_too_never_makes_an_order_worse(seed):
    problem = random_problem(np.random.default_rng(seed))
    _, order = list_scheduled(problem)
    values, ran, _ = replay(problem, order, fill=True)
    case, unused = instance_of(problem), np.zeros((problem.ranks, 2))
    made = scratch(problem.stages, problem.microbatches, problem.ranks, len(ran.tokens))
    tokens, *_ = anneal(case, ran.first, ran.tokens, unused, False, MAKESPAN, -np.inf, 300, 0.5, seed, made)
    improved, again, peak = replay(problem, Order(ran.first, tokens))
    assert improved[0] + 0.01 * improved[2] <= values[0] + 0.01 * values[2] + 1e-9
    assert_like_simulate(problem, again, improved, peak)


@pytest.mark.parametrize("seed", range(20))
def test_tuning_builds_orders_that_run_and_ends_at_its_goal(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    _, order = list_scheduled(problem)
    offset = np.zeros((problem.stages, 2))
    offset[:, 1] = (problem.stages - np.arange(problem.stages)) * problem.ranks / problem.stages
    sizes = np.full((problem.ranks, 2), 0.5), np.full(problem.ranks, 0.25)
    start = instance_of(problem), order.first, by_number(problem), offset, *sizes, True, 1.0, MAKESPAN
    tokens, _, runs = tune(*start, -np.inf, 100, 0.5, seed)
    assert runs == 101
    filled, ran, peak = replay(problem, Order(order.first, tokens), fill=True)
    assert_like_simulate(problem, ran, filled, peak)
    tokens, _, runs = tune(*start, np.inf, 100, 0.5, seed)
    assert (tokens.tolist(), runs) == (order.tokens.tolist(), 1)


def test_the_kernels_are_deterministic():
    problem = random_problem(np.random.default_rng(7))
    _, order = list_scheduled(problem)
    case, patience = instance_of(problem), np.full((problem.ranks, 2), 0.5)
    arguments = case, order.first, order.tokens, patience, True, MAKESPAN, -np.inf, 500, 0.5
    made = scratch(problem.stages, problem.microbatches, problem.ranks, len(order.tokens))
    first, second, other = (anneal(*arguments, seed, made) for seed in (3, 3, 4))
    assert first[0].tolist() == second[0].tolist()
    assert first[1].tolist() == second[1].tolist()
    assert other[1].tolist() != first[1].tolist()


def test_interpreted_kernels_give_the_same():
    problem = random_problem(np.random.default_rng(11))
    _, order = list_scheduled(problem)
    case, patience = instance_of(problem), np.full((problem.ranks, 2), 0.5)
    made = [scratch(problem.stages, problem.microbatches, problem.ranks, len(order.tokens)) for _ in range(2)]
    compiled = run(case, order.first, order.tokens, patience, True, made[0])
    interpreted = run.py_func(case, order.first, order.tokens, patience, True, made[1])
    assert compiled == pytest.approx(interpreted)
    assert made[0].ran.tolist() == made[1].ran.tolist()


def test_too_little_memory_is_infinite():
    problem = Problem.of(Costs(), Placement.v(2, 4), microbatches=4, memory_limit=[2, 1.9])
    values, order = list_scheduled(problem)
    assert values[0] == np.inf
    assert list_scheduled(Problem.of(Costs(), Placement.v(2, 4), microbatches=4, memory_limit=2))[0][0] < np.inf
    assert replay(problem, order, fill=True)[0][0] == np.inf


def test_a_deadlock_is_infinite():
    problem = Problem.of(Costs(), Placement.loop(2, 2), microbatches=1)
    assert replay(problem, Order.from_rows([[3, 0], [4, 7]]))[0][0] == np.inf
    assert replay(problem, Order.from_rows([[0, 2, 1], [4, 7]]))[0][0] == np.inf
    assert replay(problem, Order.from_rows([[0, 1, 2], [4, 7]]))[0][0] < np.inf


def test_a_whole_backward_is_chosen_where_it_is_cheaper():
    costs = Costs(backward_input=1, backward_weight=1, backward=1.2)
    problem = Problem.of(costs, Placement.loop(1, 1), microbatches=4)
    _, order = list_scheduled(problem)
    start = instance_of(problem), order.first, order.tokens, np.ones((1, 2))
    tokens, _, _ = anneal(*start, True, MAKESPAN, -np.inf, 400, 0.1, 0, scratch(1, 4, 1, len(order.tokens)))
    assert (tokens % KINDS == B).sum() == 4
    assert not (tokens % KINDS == W).any()
