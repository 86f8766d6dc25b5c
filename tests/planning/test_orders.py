"""Checks that an order and a schedule are two forms of the same thing."""

import numpy as np
import pytest

from penstock.ir.schedule import Schedule
from penstock.planning.orders import Order
from penstock.schedules.registry import RECIPES
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.name != "ForwardOnly"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 9)])
def test_a_schedule_survives_the_way_to_an_order_and_back(recipe, ranks, microbatches):
    schedule = recipe.generate(ranks, microbatches)
    if recipe.name == "LoopedBFS" and microbatches > 1:
        assert Order.from_schedule(schedule) is None  # it runs its backwards last in, first out
        return
    problem = Problem.of(Costs(), schedule.placement, microbatches=microbatches)
    again = Order.from_schedule(schedule).to_schedule(problem, "again")
    cells = [[part for cell in row if cell for part in cell.parts] for row in schedule.actions]
    assert [list(row) for row in again.actions] == cells


def test_a_schedule_out_of_order_has_no_order():
    assert Order.from_schedule(Schedule([["0F1", "0F0", "0B0", "0B1"]])) is None
    assert Order.from_schedule(Schedule([["0F0", "0F1", "0B1", "0B0"]])) is None


def test_b_and_i_of_a_stage_share_their_count_and_w_follow_i():
    schedule = Schedule([["0F0", "0F1", "0B0", "0I1", "0W1"]])
    order = Order.from_schedule(schedule)
    assert order.tokens.tolist() == [0, 0, 3, 1, 2]
    problem = Problem.of(Costs(), schedule.placement, microbatches=2)
    assert order.to_schedule(problem, "") == schedule
    assert order.without_weights().tokens.tolist() == [0, 0, 3, 1]
    assert np.array_equal(order.first, [0, 5])
