"""Improves an order of a problem that is too large to be searched whole: one window of time after the other."""

from __future__ import annotations

import random
from time import perf_counter
from typing import TYPE_CHECKING, Final

from penstock.planning.exact.model import build_model
from penstock.planning.exact.results import ExactResult, Progress
from penstock.planning.exact.runs import run_solver
from penstock.planning.exact.timed import tasks_of
from penstock.planning.exact.units import ROUNDING, Units
from penstock.planning.exact.values import check_objective, checked_value, times_in, value_of
from penstock.planning.exact.windows import Timed, order_with, window_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.planning.exact.runs import Solution
    from penstock.planning.orders import Order
    from penstock.simulation.problem import Problem

#: The number of tasks in the first windows; windows grow while they are searched in less than a ``TURN``.
FIRST_WIDTH: Final = 40
GROWTH: Final = 1.3
#: The effort, in about seconds, after which a window is given up.
TURN: Final = 1.0


def improve(
    problem: Problem,
    objective: str,
    order: Order,
    *,
    floor: float = 0.0,
    time_limit: float,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> ExactResult:
    """Return a better order if there is one that differs in a window of time only, again and again.

    Outside of the window, everything keeps its order. Windows are drawn at random and grow as far as they can be
    searched with little effort, counted independently of the machine: the same arguments take the same way, and the
    time limit decides how far. The bound that comes back is ``floor``. A period is improved through the span.

    >>> from penstock.ir.placement import Placement
    >>> from penstock.planning.orders import Order
    >>> from penstock.schedules.one_f_one_b import one_f_one_b
    >>> from penstock.simulation.costs import Costs
    >>> from penstock.simulation.problem import Problem
    >>> problem = Problem.of(Costs(), Placement.loop(2, 2), microbatches=4)
    >>> worst = Order.from_rows([[0, 1, 2] * 4, [4, 5, 6] * 4])
    >>> improve(problem, "makespan", worst, floor=13, time_limit=10).value
    13.0

    Args:
        problem: what to schedule.
        objective: "makespan", "span" or "period".
        order: an order that runs and fits into the memory.
        floor: a value that no order is below, as far as known.
        time_limit: the seconds after which to stop.
        seed: that of the windows and of the solver.
        progress: called with each better order.

    Raises:
        ScheduleError: the order does not run, exceeds the memory, or splits what may not be split.
    """
    check_objective(objective)
    value = checked_value(problem, order, objective)
    until = perf_counter() + time_limit
    rng = random.Random(seed)
    units = Units.of(times_in(problem), largest=value)
    width, was_interrupted, failures = FIRST_WIDTH, False, 0
    timed = Timed.of(tasks_of(problem, order, units), has_own_begins=objective != "makespan")
    while value > floor * (1 + ROUNDING) and perf_counter() < until and not was_interrupted:
        count = len(timed.by_time)
        begin = rng.randrange(-width // 2, max(1, count - width // 2))
        window = window_of(problem, timed, min(max(0, begin), max(0, count - width)), width)
        solutions: list[Solution] = []
        outcome = run_solver(
            build_model(window.part), time_limit=until - perf_counter(), effort=TURN, seed=seed, found=solutions.append
        )
        was_interrupted = outcome.was_interrupted
        failures += 1
        if solutions:
            changed = order_with(timed, window, solutions[-1])
            found = value_of(problem, changed, objective)
            if found < value * (1 - ROUNDING):
                order, value, failures = changed, found, 0
                timed = Timed.of(tasks_of(problem, order, units), has_own_begins=objective != "makespan")
                if progress:
                    progress(Progress(order, value, min(floor, value)))
        if width >= count and failures and outcome.bound is None:
            break  # the window is the whole order, and there is nothing better
        if outcome.effort >= TURN:
            width = max(FIRST_WIDTH // 2, int(width / GROWTH))
        elif failures >= max(2, 2 * count // width):
            width, failures = min(count, int(width * GROWTH) + 1), 0
    bound = min(floor, value)
    return ExactResult(order, value, bound, value <= floor * (1 + ROUNDING), was_interrupted)
