"""Runs orders of forwards and input gradients, and fills gaps with weight gradients; as a simulation, rank by rank.

``planning/refit.py`` has a compiled twin, which gives the same results.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.schedules.action_costs import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.schedules.action_costs import ActionCosts

    Ints = NDArray[np.int64]


class Plan(NamedTuple):
    """What every rank runs, and when it fills a gap.

    Attributes:
        orders: by rank, the actions that it runs in this order.
        delays: whether weight gradients are not in the orders, but fill gaps.
        limits: by rank, the memory that it may hold.
        patience: how long a gap must be to be filled, as a share of what fills it.
        hurried_from: by rank, the index in its order from which any gap is filled.
    """

    orders: list[Ints]
    delays: bool
    limits: list[float]
    patience: float
    hurried_from: list[int]


class Run(NamedTuple):
    """A simulated run: the order of every rank, its peak memory, and when it began and ended."""

    rows: Sequence[Sequence[int] | Ints]
    peaks: Sequence[float]
    begins: Sequence[float]
    ends: Sequence[float]

    @property
    def quality(self) -> tuple[float, float]:
        """The span and the makespan, rounded so that the first of equal ones is the best."""
        span = max(end - begin for begin, end in zip(self.begins, self.ends, strict=True))
        return float(f"{span:.9g}"), float(f"{max(self.ends) - min(self.begins):.9g}")


class GapFilling:
    """Simulates plans for a schedule, interpreted: lists are faster than arrays."""

    def __init__(self, actions: ActionCosts) -> None:
        self._actions = _Actions(
            actions.awaits.tolist(),
            actions.delay.tolist(),
            actions.duration.tolist(),
            actions.change.tolist(),
            actions.owes.tolist(),
            actions.reader.tolist(),
            actions.dispatch,
        )

    def run(self, plan: Plan) -> Run:
        """Let every rank run what it chooses, whenever it or a rank it waits for has started something."""
        actions = self._actions
        owes = actions.owes if plan.delays else [NONE] * len(actions.owes)
        ranks = [
            _Rank(order.tolist(), owes, limit, plan.patience, hurried_from)
            for order, limit, hurried_from in zip(plan.orders, plan.limits, plan.hurried_from, strict=True)
        ]
        ends = [inf] * len(actions.owes) + [-inf]
        looks = [(actions.dispatch, rank) for rank in range(len(ranks))]
        while looks:
            now, number = heappop(looks)
            rank = ranks[number]
            if now < rank.end + actions.dispatch:
                continue
            action, later = rank.choose(now, ends, actions)
            if action == NONE:
                if later < inf:
                    heappush(looks, (later, number))
                continue
            rank.run(action, now, actions)
            ends[action] = rank.end
            heappush(looks, (rank.end + actions.dispatch, number))
            reader = actions.reader[action]
            if reader != number and ranks[reader].end + actions.dispatch <= now:
                heappush(looks, (now, reader))  # it waits, and now knows for how long
        return Run(
            [np.array(rank.ran, np.int64) for rank in ranks],
            [rank.peak for rank in ranks],
            [rank.begin for rank in ranks],
            [rank.end for rank in ranks],
        )


class _Actions(NamedTuple):
    """``ActionCosts`` as lists."""

    awaits: list[int]
    delay: list[float]
    duration: list[float]
    change: list[float]
    owes: list[int]
    reader: list[int]
    dispatch: float


class _Rank:
    """A rank while it is simulated.

    Attributes:
        order: the actions that it runs in this order.
        owes: the weight gradient of each action, to be run later, or none.
        limit: the memory limit.
        patience: how long a gap must be to be filled, as a share of what fills it.
        hurried_from: the index in the order from which any gap is filled.
    """

    __slots__ = (
        "begin", "end", "held", "hurried_from", "limit", "order", "owed", "owes", "patience", "peak", "place", "ran"
    )  # fmt: skip

    def __init__(self, order: list[int], owes: Sequence[int], limit: float, patience: float, hurried_from: int) -> None:
        self.order, self.owes, self.limit, self.patience, self.hurried_from = order, owes, limit, patience, hurried_from
        self.place = 0
        self.owed: deque[int] = deque()
        self.ran: list[int] = []
        self.held = self.peak = 0.0
        self.begin = self.end = -inf

    def choose(self, now: float, ends: Sequence[float], actions: _Actions) -> tuple[int, float]:
        """Return the action to run now, or none and when to look again."""
        if self.place == len(self.order):
            return (self.owed.popleft(), now) if self.owed else (NONE, inf)
        due = self.order[self.place]
        ready = ends[actions.awaits[due]] + actions.delay[due]
        if self.owed and (self.held + actions.change[due] > self.limit or self._is_worth(ready - now, actions)):
            return self.owed.popleft(), now
        if ready > now:
            return NONE, ready
        self.place += 1
        return due, now

    def _is_worth(self, gap: float, actions: _Actions) -> bool:
        """Return whether to fill a gap with the weight gradient that has been owed the longest."""
        if gap <= 0:
            return False
        return self.place >= self.hurried_from or gap >= self.patience * actions.duration[self.owed[0]]

    def run(self, action: int, now: float, actions: _Actions) -> None:
        """Start an action."""
        if not self.ran:
            self.begin = now
        self.end = now + actions.duration[action]
        self.ran.append(action)
        self.held += actions.change[action]
        self.peak = max(self.peak, self.held)
        if self.owes[action] != NONE:
            self.owed.append(self.owes[action])
