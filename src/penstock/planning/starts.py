"""Yields the orders that a search starts from."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, FORWARD, FULL_BACKWARD
from penstock.ir.placement import Placement
from penstock.planning.blocks import best_orders
from penstock.planning.orders import KINDS, F, Order, W
from penstock.simulation.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.ir.schedule import Schedule
    from penstock.planning.evaluator import Evaluator, Trial
    from penstock.simulation.problem import Problem

    Floats = NDArray[np.float64]

#: How long a gap must be to be filled, as a share of the W that fills it.
PATIENCES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
#: How many microbatches each rank keeps in flight, as a share of the number of ranks.
DEPTHS: Final = (0.5, 1.0, 1.5, 2.0)
#: How many microbatches a stage runs before the next stage of its rank begins, as a share of the number of ranks.
LAGS: Final = (0.0, 0.5, 1.0)


class ListStart(NamedTuple):
    """Parameters of list scheduling: see ``kernels/list_schedule.py``; ``unit`` is that of the offsets."""

    origin: str
    urgency: Floats
    offset: Floats
    unit: float


def list_starts(problem: Problem) -> Iterator[ListStart]:
    """Yield parameters that keep some microbatches in flight: 1 of ``DEPTHS`` is ZB-H1, and 2 is ZB-H2."""
    stages, ranks, rank_of = problem.stages, problem.ranks, problem.rank_of
    numbers = np.arange(problem.microbatches, dtype=np.float64)
    urgency = np.broadcast_to(numbers, (2, stages, problem.microbatches)).copy()
    ahead = (stages - np.arange(stages)) * ranks / stages
    earlier = np.array([(rank_of[:stage] == rank_of[stage]).sum() for stage in range(stages)], np.float64)
    lags = LAGS if earlier.any() else (0.0,)
    for depth, lag in product(DEPTHS, lags):
        forward = earlier * lag * ranks
        offset = np.stack([forward, forward + depth * ahead], axis=1)
        yield ListStart("list scheduling", urgency, offset, 1.0)


def adapted_start(problem: Problem, schedule: Schedule) -> ListStart:
    """Return parameters that run actions in the order of their starts in another schedule of this placement."""
    timeline = simulate(schedule, problem.costs)
    actions = timeline.step_graph.actions
    urgency = np.zeros((2, problem.stages, problem.microbatches))
    for side, kinds in enumerate(((FORWARD,), (BACKWARD_INPUT, FULL_BACKWARD))):
        mine = actions.positions_of(*kinds)
        urgency[side, actions.stage[mine], actions.microbatch[mine]] = timeline.start[actions.cell[mine]]
    return ListStart(
        f"{schedule.metadata['name']}, adapted",
        np.sort(urgency, axis=2),
        np.zeros((problem.stages, 2)),
        timeline.makespan / problem.microbatches,
    )


def block_orders(problem: Problem) -> list[Order]:
    """Return the orders of the best building blocks for the memory of a V with two stages per rank.

    They are the best known ones between the memory of V-Min and that of ZB-V, if all stages are alike. If I releases
    memory, more microbatches may fit than the blocks assume.
    """
    if problem.ranks < 2 or problem.placement != Placement.v(problem.ranks, 2 * problem.ranks) or not problem.is_chain:
        return []
    most = 2 * problem.ranks
    room = float((problem.budget / np.maximum(problem.activation.max(), 1e-300)).min()) + 1e-9
    held = int(min(room, most))
    levels = {held, min(held + 1, most)} if problem.input_release.any() else {held}
    return [each.order for level in sorted(levels) for each in best_orders(problem.ranks, problem.microbatches, level)]


def ordered_start(problem: Problem, order: Order) -> ListStart:
    """Return parameters that run actions in the order of their places in another order."""
    urgency = np.zeros((2, problem.stages, problem.microbatches))
    for row in order.rows:
        for token in np.unique(row):
            if token % KINDS != W:
                urgency[0 if token % KINDS == F else 1, token // KINDS] = np.flatnonzero(row == token)
    unit = len(order.tokens) / problem.ranks / problem.microbatches
    return ListStart("building block, adapted", urgency, np.zeros((problem.stages, 2)), unit)


def known_trials(evaluator: Evaluator, schedule: Schedule) -> Iterator[Trial]:
    """Yield a known schedule as it is, and with its W placed for these costs, if it fits."""
    name = str(schedule.metadata["name"])
    order = Order.from_schedule(schedule)
    if order is None:
        return
    if splits_only_where_allowed(evaluator.problem, schedule):
        trial = evaluator.replay(name, order)
        if trial is not None:
            yield trial
    yield from filled(evaluator, f"{name}, fitted", evaluator.split(order))


def filled(evaluator: Evaluator, origin: str, base: Order) -> Iterator[Trial]:
    """Yield the best ways to place W in an order of F and backwards."""
    trials = [evaluator.fill(origin, base, patience) for patience in PATIENCES]
    ordered = sorted((trial for trial in trials if trial is not None), key=evaluator.quality)
    yield from ordered[:1]
    if ordered:
        hurried = ordered[0].patience.copy()
        hurried[:, 1] = 0.0
        trial = evaluator.fill(origin, base, hurried)
        if trial is not None:
            yield trial


def splits_only_where_allowed(problem: Problem, schedule: Schedule) -> bool:
    """Return whether a schedule splits the backward only of stages that allow it."""
    codes = schedule.codes
    split = packed.stages(codes[packed.types(codes) == packed.TYPE_NUMBER[BACKWARD_INPUT]])
    return bool(problem.splits[split].all())


def best_of(evaluator: Evaluator, trials: Iterable[Trial | None], most: int) -> list[Trial]:
    """Return the best distinct trials, best first."""
    found: list[Trial] = []
    for trial in sorted((trial for trial in trials if trial is not None), key=evaluator.quality):
        if not any(np.array_equal(trial.order.tokens, other.order.tokens) for other in found):
            found.append(trial)
        if len(found) == most:
            break
    return found
