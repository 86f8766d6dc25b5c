"""Checks the period against long runs."""

import numpy as np
import pytest

from penstock.schedules.registry import RECIPES, build
from penstock.simulation.costs import Costs
from penstock.simulation.period import largest_cycle_mean, steady_period
from penstock.simulation.simulate import simulate

TRAINING = [recipe.name for recipe in RECIPES if recipe.name != "ForwardOnly"]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_run_takes_the_period_per_step(name, seed):
    rng = np.random.default_rng(seed)
    schedule = build(name, ranks=3, microbatches=5)
    fields = ("forward", "backward_input", "backward_weight", "optimizer")
    costs = Costs(**{field: rng.uniform(0.5, 2, schedule.stages) for field in fields}, latency=0.3, dispatch=0.1)
    period = steady_period(schedule, costs)
    long, longer = (simulate(schedule, costs, steps=steps, synchronise=False).makespan for steps in (40, 100))
    assert (longer - long) / 60 == pytest.approx(period, rel=1e-3)
    assert period - costs.dispatch <= simulate(schedule, costs).span + max(costs.optimizer) * 2 + 1e-9


@pytest.mark.parametrize("name", TRAINING)
def test_without_optimizer_a_period_is_at_most_the_span(name):
    schedule = build(name, ranks=4, microbatches=9)
    assert steady_period(schedule) <= simulate(schedule).span + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_cycle_mean_is_that_of_some_cycle_and_of_no_other_more(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    weight = np.where(rng.random((size, size)) < 0.7, rng.uniform(0, 5, (size, size)), -np.inf)
    best = [0.0]

    def visit(path, total):
        for node in range(path[0], size):
            if node == path[0]:
                best.append((total + weight[path[-1], node]) / len(path))
            elif node not in path:
                visit([*path, node], total + weight[path[-1], node])

    for node in range(size):
        visit([node], 0.0)
    assert largest_cycle_mean(weight) == pytest.approx(max(best))
