"""Runs orders of one problem with the kernels, and counts how much work that was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.planning.instance import instance_of
from penstock.planning.kernels import list_schedule, replay
from penstock.planning.orders import KINDS, B, I, Order, W

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.planning.kernels.replay import Scratch
    from penstock.simulation.problem import Problem

    Floats = NDArray[np.float64]

#: How much makespan and span count for each objective. A period is at most the span, and found through it.
WEIGHTS: Final = {
    "makespan": np.array([1.0, 0.0]),
    "span": np.array([0.0, 1.0]),
    "period": np.array([0.0, 1.0]),
}


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """An order that was run.

    Attributes:
        origin: where it comes from, for people.
        order: what every rank ran, with W.
        base: its F and backwards alone.
        patience: for each rank, how long gaps must be to be filled; what made ``order`` of ``base``.
        makespan: from the first start to the last end.
        span: the longest time of a rank from its own first start to its own last end.
    """

    origin: str
    order: Order
    base: Order
    patience: Floats
    makespan: float
    span: float


class Evaluator:
    """Runs orders of one problem.

    Attributes:
        problem: the problem.
        weights: how much makespan and span count.
        goal: a value that cannot be improved, where a search ends.
        work: the number of actions that were run so far.
    """

    def __init__(self, problem: Problem, objective: str, goal: float = -math.inf) -> None:
        self.problem = problem
        self.weights = WEIGHTS[objective]
        self.goal = goal + 1e-9 * abs(goal) if math.isfinite(goal) else goal
        self.work = 0
        self._extra = 0.0
        if objective == "period":  # which counts the optimizer, and getting to the next step
            optimizer = np.bincount(problem.rank_of, problem.costs.per_stage("optimizer", problem.stages))
            self._extra = float(optimizer.max(initial=0.0)) + problem.dispatch
        self._case = instance_of(problem)
        counts = 2 * problem.microbatches * np.bincount(problem.rank_of, minlength=problem.ranks)
        self._first = np.append(0, np.cumsum(counts)).astype(np.int64)
        self._room: dict[int, Scratch] = {}

    @property
    def length(self) -> int:
        """The number of F and backwards."""
        return int(self._first[-1])

    def primary(self, trial: Trial) -> float:
        """Return the value that is minimised first; for a period, what it is at most."""
        return float(self.weights @ (trial.makespan, trial.span)) + self._extra

    def quality(self, trial: Trial) -> tuple[float, float]:
        """Return what is minimised, rounded so that equal values are equal: the objective, then the other time."""
        other = float(self.weights[::-1] @ (trial.makespan, trial.span))
        return float(f"{self.primary(trial):.10g}"), float(f"{other:.10g}")

    def is_optimal(self, trial: Trial) -> bool:
        """Return whether a trial has reached the goal."""
        return self.primary(trial) <= self.goal

    def fill(self, origin: str, base: Order, patience: float | Floats) -> Trial | None:
        """Run F and backwards in this order, with W in the gaps; return None if it deadlocks or lacks memory."""
        shares = np.broadcast_to(np.asarray(patience, np.float64), (self.problem.ranks, 2)).copy()
        ran = self._run(base, shares, fill=True)
        return None if ran is None else Trial(origin, ran[0], base, shares, *ran[1])

    def replay(self, origin: str, order: Order) -> Trial | None:
        """Run an order that has its W; return None if it deadlocks or lacks memory."""
        shares = np.full((self.problem.ranks, 2), 0.5)
        ran = self._run(order, shares, fill=False)
        return None if ran is None else Trial(origin, order, order.without_weights(), shares, *ran[1])

    def list(
        self, origin: str, urgency: Floats, offset: Floats, *, patience: float = 0.5, wait: float = 0.25, reserve: bool
    ) -> Trial | None:
        """Build an order by list scheduling."""
        tokens = np.zeros(self.length, np.int32)
        shares, waits = self._parameters(patience, wait)
        self.work += 2 * self.length
        values = list_schedule.schedule(
            self._case, self._first, urgency, offset, shares, waits, reserve, tokens
        )  # fmt: skip
        return self.fill(origin, Order(self._first, tokens), shares) if math.isfinite(values[0]) else None

    def tune(
        self,
        origin: str,
        urgency: Floats,
        offset: Floats,
        *,
        reserve: bool,
        unit: float,
        steps: int,
        hot: float,
        seed: int,
    ) -> Trial | None:
        """Improve the parameters of list scheduling; return the best order that it built."""
        tokens, shares, runs = list_schedule.tune(
            self._case, self._first, urgency, offset, *self._parameters(0.5, 0.25), reserve, unit,
            self.weights, self.goal - self._extra, steps, hot, seed,
        )  # fmt: skip
        self.work += 2 * runs * self.length
        return self.fill(origin, Order(self._first, tokens), shares)

    def anneal(self, trial: Trial, *, steps: int, hot: float, seed: int) -> Trial:
        """Improve a trial by moving F and backwards."""
        base, goal = trial.base, self.goal - self._extra
        tokens, shares, runs = replay.anneal(
            self._case,
            base.first,
            base.tokens,
            trial.patience,
            True,
            self.weights,
            goal,
            steps,
            hot,
            seed,
            self._scratch(len(base.tokens)),
        )
        self.work += runs * self.length
        return self._better(trial, self.fill(trial.origin, Order(base.first, tokens), shares))

    def anneal_all(self, trial: Trial, *, steps: int, hot: float, seed: int) -> Trial:
        """Improve a trial by moving W, too."""
        order, goal = trial.order, self.goal - self._extra
        tokens, _, runs = replay.anneal(
            self._case,
            order.first,
            order.tokens,
            trial.patience,
            False,
            self.weights,
            goal,
            steps,
            hot,
            seed,
            self._scratch(len(order.tokens)),
        )
        self.work += runs * len(order.tokens)
        return self._better(trial, self.replay(trial.origin, Order(order.first, tokens)))

    def split(self, order: Order) -> Order:
        """Return the order with the backwards that the stages allow: I where they can be split, B elsewhere."""
        rows = []
        for row in order.rows:
            row = row[row % KINDS != W]
            stage, kind = row // KINDS, row % KINDS
            whole = np.where(self.problem.splits[stage], I, B)
            rows.append(KINDS * stage + np.where((kind == I) | (kind == B), whole, kind))
        return Order.from_rows(rows)

    def _better(self, before: Trial, after: Trial | None) -> Trial:
        return before if after is None or self.quality(after) >= self.quality(before) else after

    def _run(self, order: Order, patience: Floats, *, fill: bool) -> tuple[Order, tuple[float, float]] | None:
        made = self._scratch(len(order.tokens))
        self.work += len(order.tokens)
        makespan, span, _ = replay.run(self._case, order.first, order.tokens, patience, fill, made)
        if not math.isfinite(makespan):
            return None
        rows = [made.ran[2 * begin : end] for begin, end in zip(order.first[:-1], made.ran_to, strict=True)]
        return Order.from_rows(rows), (makespan, span)

    def _scratch(self, length: int) -> Scratch:
        """Return where to run orders of this length; what is there stays until the next run."""
        if length not in self._room:
            problem = self.problem
            self._room[length] = replay.scratch(problem.stages, problem.microbatches, problem.ranks, length)
        return self._room[length]

    def _parameters(self, patience: float, wait: float) -> tuple[Floats, Floats]:
        return np.full((self.problem.ranks, 2), patience), np.full(self.problem.ranks, wait)
