"""Checks that the exact search finds the optimum, proves it, and never claims more; and what windows improve."""

import os
import random
import signal
import sys
import threading

import pytest

from penstock.errors import PlanError, ScheduleError
from penstock.ir.edges import Edge
from penstock.ir.placement import Placement
from penstock.planning.exact import improve, is_available, solve
from penstock.planning.exact.values import value_of
from penstock.planning.orders import Order
from penstock.schedules.registry import build
from penstock.simulation.bounds import OBJECTIVES
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem
from penstock.simulation.simulate import simulate
from penstock.verification.check import verify
from planning.brute_force import optimum, sequential

SIZES = [
    (Placement.loop(2, 2), 2, None),
    (Placement.loop(2, 2), 3, None),
    (Placement.loop(3, 3), 2, None),
    (Placement.v(2, 4), 1, None),
    (Placement.from_rows([[0, 2], [1]]), 1, None),
    (Placement.from_rows([[1, 2], [0]]), 1, [Edge(0, (1, 2))]),
]


def draw_problem(seed):
    """Return a random tiny problem in which memory, latency and dispatch matter."""
    rng = random.Random(seed)
    placement, microbatches, edges = SIZES[seed % len(SIZES)]
    unit = rng.choice([1, 0.5, 0.001, 1 / 3])

    def draw(least, most):
        return [unit * rng.randint(least, most) for _ in range(placement.stages)]

    halves = draw(1, 9), draw(1, 9)
    costs = Costs(
        forward=draw(1, 9),
        backward_input=halves[0],
        backward_weight=halves[1],
        backward=[a + b - rng.choice([0, 0, unit / 2]) for a, b in zip(*halves, strict=True)],
        optimizer=draw(0, 3),
        dispatch=rng.choice([0, 0, unit]),
        latency=rng.choice([0, unit]),
        input_release=rng.choice([0, 0.3, 1]),
    )
    chunks = max(len(placement.stages_of(rank)) for rank in range(placement.ranks))
    limit = [chunks + rng.choice([0, 0.5, 1]) for _ in range(placement.ranks)]
    splits = [rng.random() < 0.8 for _ in range(placement.stages)] if microbatches < 3 else False
    return Problem.of(costs, placement, microbatches=microbatches, memory_limit=limit, splits=splits, edges=edges)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(24))
def test_finds_and_proves_what_trying_all_orders_finds(seed, objective):
    problem = draw_problem(seed)
    best = optimum(problem, objective)
    found = solve(problem, objective, sequential(problem), time_limit=30)
    assert found.bound <= best * (1 + 1e-9)
    assert found.value == pytest.approx(value_of(problem, found.order, objective), rel=1e-12)
    assert found.optimal
    assert found.value == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("limit", [1.5, 3])
def test_is_no_worse_than_any_schedule_that_fits(objective, limit):
    costs = Costs(forward=[4, 3, 5], backward_input=4, backward_weight=2, latency=1, input_release=0.5)
    problem = Problem.of(costs, Placement.loop(3, 3), microbatches=5, memory_limit=limit)
    found = solve(problem, objective, sequential(problem), time_limit=30)
    assert found.optimal
    schedule = found.order.to_schedule(problem, "exact")
    verify(schedule)
    timeline = simulate(schedule, costs)
    assert getattr(timeline, objective) == found.value
    assert max(timeline.peak_memory) <= limit
    known = [build(name, ranks=3, microbatches=5) for name in ("GPipe", "1F1B", "ZB-H1", "ZB-H2")]
    known.append(build("ZB-H1", ranks=3, microbatches=5, costs=costs))
    timelines = [simulate(schedule, costs) for schedule in known]
    fitting = [getattr(timeline, objective) for timeline in timelines if max(timeline.peak_memory) <= limit]
    assert len(fitting) == (3 if limit == 3 else 0)
    assert all(found.value <= value for value in fitting)


def test_proves_the_closed_form_of_v_schedules():
    """The span of 4 ranks and 8 microbatches with 4 chunks of memory is 24 + 24 + 11."""
    schedule = build("V-Min", ranks=4, microbatches=8)
    problem = Problem.of(Costs(), schedule.placement, microbatches=8, memory_limit=4)
    found = solve(problem, "span", Order.from_schedule(schedule), time_limit=60)
    assert (found.value, found.bound, found.optimal) == (59, 59, True)


def test_a_hint_that_reaches_the_floor_is_optimal():
    schedule = build("ZBVZeroBubble", ranks=2, microbatches=4)
    problem = Problem.of(Costs(), schedule.placement, microbatches=4)
    found = solve(problem, "span", Order.from_schedule(schedule), floor=24, time_limit=0)
    assert (found.value, found.bound, found.optimal) == (24, 24, True)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(0, 24, 5))
def test_windows_improve_an_order_and_stop_when_one_of_everything_finds_nothing(seed, objective):
    problem = draw_problem(seed)
    order, best = sequential(problem), optimum(problem, objective)
    found = improve(problem, objective, order, time_limit=60)
    assert best * (1 - 1e-9) <= found.value <= value_of(problem, order, objective)
    assert found.value == pytest.approx(value_of(problem, found.order, objective), rel=1e-12)
    assert found.bound == 0
    assert not found.optimal
    can_merge = bool((problem.whole < problem.input + problem.weight + problem.dispatch).any())
    if objective == "makespan" and not can_merge:
        assert found.value == pytest.approx(best)


def test_windows_reach_the_closed_form_of_v_schedules():
    """The span of 4 ranks and 8 microbatches with 5 chunks of memory is 24 + 24 + 8; that of V-Min is 3 more."""
    schedule = build("V-Min", ranks=4, microbatches=8)
    problem = Problem.of(Costs(), schedule.placement, microbatches=8, memory_limit=5)
    values = []
    hint = Order.from_schedule(schedule)
    found = improve(problem, "span", hint, floor=56, time_limit=120, progress=lambda step: values.append(step.value))
    assert (found.value, found.optimal) == (56, True)
    assert values == sorted(values, reverse=True)
    timeline = simulate(found.order.to_schedule(problem, "exact"), problem.costs)
    assert (timeline.span, max(timeline.peak_memory)) == (56, 5)


def test_windows_keep_to_the_memory_and_to_edges_that_skip_stages():
    edges = [Edge(0, (1, 2)), Edge(1, (3,)), Edge(2, (3,))]
    costs = Costs(forward=[3, 2, 4, 1], backward_weight=2, latency=[1, 2, 0], input_release=0.25, dispatch=0.5)
    problem = Problem.of(costs, Placement.loop(2, 4), microbatches=5, memory_limit=[3, 4], edges=edges)
    order = sequential(problem)
    found = improve(problem, "makespan", order, floor=0.8 * value_of(problem, order, "makespan"), time_limit=60)
    schedule = found.order.to_schedule(problem, "exact")
    verify(schedule)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == found.value < value_of(problem, order, "makespan")
    assert timeline.peak_memory[0] <= 3
    assert timeline.peak_memory[1] <= 4


def hard_problem():
    """Return a problem that is too large to be solved in seconds, and an order."""
    rng = random.Random(0)
    times = [[rng.randint(50, 150) for _ in range(12)] for _ in range(3)]
    costs = Costs(forward=times[0], backward_input=times[1], backward_weight=times[2])
    problem = Problem.of(costs, Placement.v(6, 12), microbatches=12, memory_limit=5)
    return problem, sequential(problem)


def test_a_time_limit_leaves_what_was_found_and_a_valid_bound():
    problem, hint = hard_problem()
    found = solve(problem, "makespan", hint, floor=float(problem.work.max()), time_limit=1)
    assert not found.optimal
    assert not found.interrupted
    assert problem.work.max() <= found.bound < found.value <= value_of(problem, hint, "makespan")


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_ctrl_c_returns_the_best_so_far():
    problem, hint = hard_problem()
    seen = []

    def interrupt(progress):
        seen.append(progress.value)
        if len(seen) == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    found = solve(problem, "makespan", hint, time_limit=300, progress=interrupt)
    assert found.interrupted
    assert found.value <= seen[0] < value_of(problem, hint, "makespan")
    assert seen == sorted(seen, reverse=True)


def test_an_error_in_the_progress_callback_ends_the_search():
    problem, hint = hard_problem()

    def fail(progress):
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        solve(problem, "makespan", hint, time_limit=300, progress=fail)


def test_the_same_seed_gives_the_same_order():
    problem = draw_problem(2)
    first, second = (solve(problem, "makespan", sequential(problem), time_limit=30, seed=7) for _ in range(2))
    assert first.order.tokens.tolist() == second.order.tokens.tolist()


def test_memory_of_waiting_values_counts_for_orders_and_not_for_bounds():
    """The model does not know of it: then an order of the model may not fit, and nothing is claimed to be optimal."""
    costs = Costs(forward=[1, 4], edge_memory=1)
    problem = Problem.of(costs, Placement.loop(2, 2), microbatches=3, memory_limit=[9, 3])
    hint = Order.from_schedule(build("1F1B", ranks=2, microbatches=3))
    found = solve(problem, "makespan", hint, time_limit=30)
    timeline = simulate(found.order.to_schedule(problem, ""), costs)
    assert max(timeline.peak_memory) <= 9
    assert timeline.peak_memory[1] <= 3


def test_a_hint_that_does_not_match_the_problem_is_refused():
    one_f_one_b = Order.from_schedule(build("1F1B", ranks=2, microbatches=4))
    zero_bubble = Order.from_schedule(build("ZB-H1", ranks=2, microbatches=4))
    tight = Problem.of(Costs(), Placement.loop(2, 2), microbatches=4, memory_limit=1)
    with pytest.raises(ScheduleError, match="exceeds the memory limit"):
        solve(tight, "makespan", one_f_one_b, time_limit=1)
    whole = Problem.of(Costs(), Placement.loop(2, 2), microbatches=4, splits=False)
    with pytest.raises(ScheduleError, match="splits the backward of stage 0"):
        solve(whole, "makespan", zero_bubble, time_limit=1)
    longer = Problem.of(Costs(), Placement.loop(2, 2), microbatches=5)
    with pytest.raises(ScheduleError, match="5 microbatches"):
        solve(longer, "makespan", one_f_one_b, time_limit=1)
    with pytest.raises(ScheduleError, match="unknown objective 'spam'"):
        solve(longer, "spam", one_f_one_b, time_limit=1)


def test_without_the_solver_the_error_says_what_to_install(monkeypatch):
    assert is_available()
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.delitem(sys.modules, "ortools.sat.python", raising=False)
    assert not is_available()
    problem = draw_problem(0)
    with pytest.raises(PlanError, match=r"penstock\[exact\]"):
        solve(problem, "makespan", sequential(problem), time_limit=1)
