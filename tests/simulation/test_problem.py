"""Checks the arrays of a problem against the schedule that the simulator would run."""

import numpy as np
import pytest

from penstock.errors import CostsError
from penstock.ir.edges import Edge
from penstock.ir.placement import Placement
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem


def test_a_stage_that_is_not_split_runs_its_whole_backward_as_input():
    costs = Costs(backward_input=2, backward_weight=3, backward=4, activation=6, input_release=0.5)
    problem = Problem.of(costs, Placement.loop(2, 2), microbatches=4, splits=[True, False])
    assert problem.input.tolist() == [2, 4]
    assert problem.weight.tolist() == [3, 0]
    assert problem.input_release.tolist() == [3, 6]
    assert problem.weight_release.tolist() == [3, 0]
    assert problem.work.tolist() == [24, 20]


def test_static_memory_counts_against_the_limit_of_its_rank():
    costs = Costs(static=[1, 2, 3, 4])
    problem = Problem.of(costs, Placement.v(2, 4), microbatches=1, memory_limit=[9, 8])
    assert problem.budget.tolist() == [4, 3]
    assert Problem.of(costs, Placement.v(2, 4), microbatches=1).budget.tolist() == [np.inf, np.inf]


def test_edges_name_their_providers_and_only_those_with_a_gradient_go_back():
    edges = [Edge(0, (1, 2)), Edge(1, (2,), gradient=False)]
    problem = Problem.of(Costs(latency=[1, 5]), Placement.loop(3, 3), microbatches=1, edges=edges)
    forward, backward = problem.forward_inputs, problem.backward_inputs
    assert (forward.first.tolist(), forward.stage.tolist(), forward.delay.tolist()) == (
        [0, 0, 1, 3],
        [0, 0, 1],
        [1, 1, 5],
    )
    assert (backward.first.tolist(), backward.stage.tolist(), backward.delay.tolist()) == ([0, 2, 2, 2], [1, 2], [1, 1])


@pytest.mark.parametrize("limit", [-1, [1, 2, 3], float("nan"), "much"])
def test_bad_limits_are_named(limit):
    with pytest.raises(CostsError, match="memory_limit"):
        Problem.of(Costs(), Placement.loop(2, 2), microbatches=1, memory_limit=limit)
