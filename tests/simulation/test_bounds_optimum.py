"""For tiny problems, where all orders can be tried, no bound is above the optimum, and most are equal to it."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.placement import Placement
from penstock.simulation.bounds import lower_bounds
from penstock.simulation.bounds.memory_order import held_at_once
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem
from random_schedules import random_costs


def orders_of(problem, rank):
    """Yield all orders of a rank in which microbatches run in order and memory is kept, as lists of (type, stage)."""
    stages = problem.placement.stages_of(rank)
    last = problem.microbatches

    def extend(order, done, held):
        if len(order) == 3 * last * len(stages):
            yield list(order)
        for stage in stages:
            forward, inward, weight = (done[kind, stage] for kind in "FIW")
            earlier = [other for other in stages if other < stage]
            later = [other for other in stages if other > stage]
            steps = {
                "F": all(done["F", other] > forward for other in earlier) and forward < last,
                "I": all(done["I", other] > inward for other in later) and inward < forward,
                "W": weight < inward,
            }
            for kind, can_run in steps.items():
                taken = {"F": problem.activation, "I": -problem.input_release, "W": -problem.weight_release}[kind][
                    stage
                ]
                if can_run and held + max(taken, 0) <= problem.budget[rank] + 1e-9:
                    order.append((kind, stage))
                    done[kind, stage] += 1
                    yield from extend(order, done, held + taken)
                    done[kind, stage] -= 1
                    order.pop()

    yield from extend([], {(kind, stage): 0 for kind in "FIW" for stage in stages}, 0.0)


def value_of(problem, orders, objective):
    """Return the value of these orders in a chain, or None if they deadlock."""
    starts = []
    for origin in [None] if objective == "makespan" else range(problem.ranks):
        start = run(problem, orders, origin)
        if start is None:
            return None
        starts.append(start)
    if objective == "makespan":
        return max(starts[0])
    return max(starts[0][0], starts[1][1], (starts[0][1] + starts[1][0]) / 2)


def run(problem, orders, origin):
    """Return when each rank ends, counted from the first start of a rank, or of any if None."""
    time = {"F": problem.forward, "I": problem.input, "W": problem.weight}
    ends, place, count = {}, [0] * len(orders), {}
    clock = [0.0 if origin in (None, rank) else -np.inf for rank in range(len(orders))]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                kind, stage = order[place[rank]]
                microbatch = count.get((kind, stage), 0)
                inputs = {"F": [("F", stage - 1)], "I": [("F", stage), ("I", stage + 1)], "W": [("I", stage)]}[kind]
                waits = [(other, at, microbatch) for other, at in inputs if 0 <= at < problem.stages]
                if not all(wait in ends for wait in waits):
                    break
                begin = clock[rank]
                for other, at, _ in waits:
                    edge = min(at, stage)
                    crosses = problem.rank_of[at] != rank
                    delay = problem.forward_inputs.delay[edge] if crosses else 0.0
                    begin = max(begin, ends[other, at, microbatch] + delay)
                clock[rank] = ends[kind, stage, microbatch] = begin + time[kind][stage]
                count[kind, stage] = microbatch + 1
                place[rank] += 1
                moved = True
    return clock if all(at == len(order) for at, order in zip(place, orders, strict=True)) else None


def optimum(problem, objective):
    choices = itertools.product(*(list(orders_of(problem, rank)) for rank in range(problem.ranks)))
    return min(value for orders in choices if (value := value_of(problem, orders, objective)) is not None)


def tiny_problem(chance):
    """Return two ranks with one stage each and three microbatches, or with a V, two microbatches, and least memory."""
    is_v = chance.random() < 0.3
    placement = Placement.v(2, 4 if is_v else 2)
    stages = placement.stages
    costs = random_costs(chance, stages, stages - 1, fine=False)
    more = {"latency": [chance.choice([0.0, 0.5, 2.0]) for _ in range(stages - 1)]}
    more["activation"] = 1.0 if is_v else [chance.choice([1.0, 2.0]) for _ in range(stages)]
    more["input_release"] = chance.choice([0.0, 0.0, 0.5, 1.0])
    costs = Costs.from_dict({**costs.to_dict(), **more})
    free = Problem.of(costs, placement, microbatches=2 if is_v else 3)
    room = [1.0, 1.0] if is_v else chance.choice([[1.0, 2.0], [2.0, 2.0], [2.0, 1.5]])
    limits = held_at_once(free) * room
    return Problem.of(costs, placement, microbatches=free.microbatches, memory_limit=limits.tolist())


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_bounds_of_tiny_problems_are_mostly_the_optimum(objective):
    chance = random.Random(objective)
    gaps = []
    for _ in range(15):
        problem = tiny_problem(chance)
        best, bounds = optimum(problem, objective), lower_bounds(problem, objective)
        for bound in bounds.found:
            assert bound.value <= best * (1 + 1e-9)
        gaps.append(best / bounds.best - 1)
    assert np.mean(np.array(gaps) < 1e-9) >= 0.75
    assert np.mean(gaps) < 0.03


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_more_memory_never_raises_a_bound_and_more_work_never_lowers_one(seed):
    problem = tiny_problem(random.Random(seed))
    for objective in ("makespan", "span", "period"):
        bound = lower_bounds(problem, objective).best
        sizes = {"microbatches": problem.microbatches, "memory_limit": (problem.memory_limit * 1.5).tolist()}
        assert lower_bounds(Problem.of(problem.costs, problem.placement, **sizes), objective).best <= bound * (1 + 1e-9)
        sizes = {"microbatches": problem.microbatches + 1, "memory_limit": problem.memory_limit.tolist()}
        assert lower_bounds(Problem.of(problem.costs, problem.placement, **sizes), objective).best >= bound * (1 - 1e-9)
