"""Searches all orders of a problem."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.planning.exact.model import build_model
from penstock.planning.exact.results import ExactResult, Progress
from penstock.planning.exact.runs import run_solver
from penstock.planning.exact.units import ROUNDING, Units
from penstock.planning.exact.values import check_objective, checked_value, times_in, value_of
from penstock.planning.exact.whole import order_of, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.planning.exact.runs import Solution
    from penstock.planning.orders import Order
    from penstock.simulation.problem import Problem


def solve(
    problem: Problem,
    objective: str,
    hint: Order,
    *,
    floor: float = 0.0,
    time_limit: float,
    effort: float = math.inf,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> ExactResult:
    """Return the best order of a problem, and how good any order can be; at least the hint.

    Every order that comes back has been simulated; what the model says about it does not count. The bound holds for all
    schedules without overlaps, those that run B where that is faster than I and W included. The solver has one thread,
    so that the same arguments give the same result unless the time limit ends the search.

    >>> from penstock.ir.placement import Placement
    >>> from penstock.planning.orders import Order
    >>> from penstock.schedules.one_f_one_b import one_f_one_b
    >>> from penstock.simulation.costs import Costs
    >>> from penstock.simulation.problem import Problem
    >>> problem = Problem.of(Costs(), Placement.loop(2, 2), microbatches=4, memory_limit=2)
    >>> found = solve(problem, "makespan", Order.from_schedule(one_f_one_b(2, 4)), time_limit=10)
    >>> found.value, found.bound, found.optimal
    (13.0, 13.0, True)

    Args:
        problem: what to schedule.
        objective: "makespan", "span" or "period".
        hint: an order that runs and fits into the memory.
        floor: a value that no order is below, as far as known.
        time_limit: the seconds after which to stop.
        effort: how much to do at most, in units of about a second, counted independently of the machine.
        seed: the seed of the solver.
        progress: called with each better order.

    Raises:
        ScheduleError: the hint does not run, exceeds the memory, or splits what may not be split.
    """
    check_objective(objective)
    value = checked_value(problem, hint, objective)
    if value <= floor * (1 + ROUNDING):
        return ExactResult(hint, value, bound=value, optimal=True, interrupted=False)
    units = Units.of(times_in(problem), largest=value)
    # With exact units, only better orders are of interest: if there is none, the hint is optimal.
    most = units.nearly_down(value) - units.is_exact
    whole = whole_of(problem, objective, hint, units, least=min(units.nearly_up(floor), most), most=most)
    best, best_value = hint, value

    def check_solution(solution: Solution) -> None:
        nonlocal best, best_value
        order = order_of(whole, solution)
        found = value_of(problem, order, objective)
        if found < best_value:
            best, best_value = order, found
            if progress:
                bound = max(floor, units.back(solution.bound))
                progress(Progress(order, found, min(bound, found)))

    outcome = run_solver(build_model(whole.part), time_limit=time_limit, effort=effort, seed=seed, found=check_solution)
    proved = most + 1 if outcome.bound is None else min(outcome.bound, most + 1)
    bound = min(max(floor, units.back(proved)), best_value)
    is_optimal = best_value <= bound * (1 + ROUNDING)
    return ExactResult(best, best_value, bound, is_optimal, outcome.was_interrupted)
