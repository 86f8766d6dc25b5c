"""The compiled fitter gives the schedules of the interpreted one, and its simulations are equal to the last bit."""

import numpy as np
import pytest

import penstock as ps
from penstock.planning.refit import CompiledGapFilling, refit
from penstock.schedules import cost_fitting
from penstock.schedules.cost_fitting import fit_to_costs
from penstock.schedules.gap_filling import GapFilling
from penstock.schedules.registry import RECIPES

FITTING = [recipe for recipe in RECIPES if recipe.fits_costs]


def random_costs(random, stages):
    """Whole numbers often tie, also with no time at all; fractions show any other order of additions."""
    if random.random() < 0.5:
        times = [random.integers(0, 4, stages).astype(float) for _ in range(3)]
    else:
        times = [random.uniform(0.5, 3.0, stages) for _ in range(3)]
    return ps.Costs(
        forward=times[0].tolist(),
        backward_input=times[1].tolist(),
        backward_weight=times[2].tolist(),
        activation=random.uniform(0.5, 1.5, stages).tolist(),
        input_release=float(random.choice([0.0, 0.4, 1.0])),
        latency=float(random.choice([0.0, 0.5, 1.0])),
        dispatch=float(random.choice([0.0, 0.0, 0.25])),
    )


@pytest.mark.parametrize("recipe", FITTING)
def test_schedules_are_the_same(recipe):
    random = np.random.default_rng(len(recipe.name))
    fitted = 0
    for _ in range(40):
        schedule = recipe.generate(int(random.integers(1, 7)), int(random.integers(1, 13)))
        costs = random_costs(random, schedule.stages)
        again = refit(schedule, costs)
        assert again == fit_to_costs(schedule, costs)
        assert again.metadata == fit_to_costs(schedule, costs).metadata
        fitted += again.metadata["name"].endswith("fitted")
    assert fitted > 5


@pytest.mark.parametrize("recipe", FITTING)
def test_simulations_are_the_same(recipe):
    """All of them, not only the chosen one."""
    random, compared = np.random.default_rng(7), []

    class Both:
        def __init__(self, actions):
            self.plain, self.compiled = GapFilling(actions), CompiledGapFilling(actions)

        def run(self, plan):
            plain, compiled = self.plain.run(plan), self.compiled.run(plan)
            assert [row.tolist() for row in compiled.rows] == [row.tolist() for row in plain.rows]
            assert compiled[1:] == plain[1:]
            compared.append(plan.patience)
            return plain

    for _ in range(15):
        schedule = recipe.generate(int(random.integers(1, 9)), int(random.integers(1, 21)))
        cost_fitting.fit(schedule, random_costs(random, schedule.stages), Both)
    assert len(compared) >= 15 * 7
