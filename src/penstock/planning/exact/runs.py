"""Runs CP-SAT so that Ctrl-C and callbacks work as in any Python code."""

from __future__ import annotations

import math
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.planning.exact.cp_sat import cp_model, solution_callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.planning.exact.model import Model


class Solution(NamedTuple):
    """Values of the variables of a model."""

    starts: list[int]
    merged: list[bool]
    bound: float


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        effort: how much the solver did, in units that take about a second, whatever else the machine does.
        bound: what the objective cannot be below; None if there is no solution at all.
        was_interrupted: whether Ctrl-C ended it.
    """

    effort: float
    bound: float | None
    was_interrupted: bool


def run_solver(
    model: Model, *, time_limit: float, seed: int, found: Callable[[Solution], None], effort: float = math.inf
) -> Outcome:
    """Minimise the objective of a model; ``found`` is called in this thread with each better solution.

    The solver runs in another thread: this one then waits in Python, where Ctrl-C raises KeyboardInterrupt.
    """
    solver: Any = cp_model().CpSolver()
    parameters = solver.parameters
    parameters.catch_sigint_signal = False
    parameters.max_time_in_seconds = max(time_limit, 0.0)
    parameters.max_deterministic_time = effort
    parameters.random_seed = seed
    parameters.num_workers = 1  # deterministic; on these problems also faster than portfolios of searches
    news: SimpleQueue[Solution | None] = SimpleQueue()
    ended: list[Any] = []

    def receive(solver: Any) -> None:
        starts = [solver.value(start) for start in model.starts]
        merged = [solver.boolean_value(choice) for choice in model.merged]
        news.put(Solution(starts, merged, solver.best_objective_bound))

    def run() -> None:
        try:
            ended.append(solver.solve(model.model, solution_callback(receive)))
        except BaseException as error:  # for the other thread to raise
            ended.append(error)
        finally:
            news.put(None)

    was_interrupted = _listen(Thread(target=run, name="CP-SAT", daemon=True), news, solver.stop_search, found)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    if ended[0] == cp_model().MODEL_INVALID:
        raise ValueError(f"the model is invalid: {model.model.validate()}")
    bound = None if ended[0] == cp_model().INFEASIBLE else solver.best_objective_bound
    return Outcome(solver.response_proto.deterministic_time, bound, was_interrupted)


def _listen(
    thread: Thread, news: SimpleQueue[Solution | None], stop: Callable[[], None], found: Callable[[Solution], None]
) -> bool:
    """Run the thread and pass on its news until it ends; return whether Ctrl-C ended it."""
    thread.start()
    was_interrupted = False
    try:
        while (solution := news.get()) is not None:
            found(solution)
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        while thread.is_alive():
            stop()  # again and again: it has no effect before the search has begun
            thread.join(0.01)
    while was_interrupted and (solution := news.get()) is not None:
        found(solution)
    return was_interrupted
