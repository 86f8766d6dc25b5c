"""Fits schedules that split the backward to given costs: weight gradients run where a rank would be idle.

An order that does not depend on costs is optimal only for the costs that it was designed for. Here forwards and input
gradients keep their order. No other rank waits for a weight gradient, so it is delayed until its rank has nothing else
to do, or needs the memory. How long a gap must be to be filled depends on who waits for what follows; several choices
are tried.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from penstock.errors import CostsError
from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from penstock.ir.dependencies import NEEDS
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

#: How long a gap must be to be filled, as a share of the weight gradient that would fill it.
PATIENCES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)

#: The tolerance of memory limits, as a share: anything below is rounding.
ROUNDING: Final = 1e-9

_FIELDS: Final = {FORWARD: "forward", BACKWARD_INPUT: "backward_input", BACKWARD_WEIGHT: "backward_weight"}
_NONE: Final = -1


@runtime_checkable
class StageCosts(Protocol):
    """The costs that are needed here; ``penstock.Costs`` has them."""

    @property
    def dispatch(self) -> float:
        """The time that a rank takes to start an action."""

    def per_stage(self, field: str, stages: int) -> Floats:
        """Return a field of ``penstock.Costs`` for each stage."""

    def transfer(self, stages: int, *, backward: bool) -> Floats:
        """Return the time of a transfer over the edge after each stage but the last."""


def fit_to_costs(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Place the weight gradients of a schedule for these costs.

    Returns the best of about a dozen orders, by span and then by makespan. The given schedule is one of them, and no
    rank holds more memory than in it. Each order takes O(actions x log ranks).

    >>> from penstock.schedules.zbv_zero_bubble import zbv_zero_bubble
    >>> from penstock.simulation.costs import Costs
    >>> plain = zbv_zero_bubble(ranks=2, microbatches=3)
    >>> for row in fit_to_costs(plain, Costs(forward=2, backward_input=2, backward_weight=1)).actions:
    ...     print(*row)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    if not isinstance(costs, StageCosts):
        raise CostsError(f"costs must be Costs, e.g. Costs(forward=1, backward_input=1), got {costs!r}")
    actions = _action_costs(schedule, costs)
    rows = [list(range(begin, end)) for begin, end in pairwise(schedule.offsets.tolist())]
    plain = _simulate(actions, [_Rank(row) for row in rows])

    delayed = set(actions.owes)
    orders = [[action for action in row if action not in delayed] for row in rows]
    limits = [peak * (1 + ROUNDING) for peak in plain.peaks]

    def simulate(patience: float, hurried: int = 0) -> _Run:
        """Run with this patience; the first ``hurried`` ranks fill any gap once only the tail is left."""
        ranks = [_Rank(order, actions.owes, limit, patience) for order, limit in zip(orders, limits, strict=True)]
        for rank in ranks[:hurried]:
            rank.hurried_from = _tail(rank.order, actions)
        return _simulate(actions, ranks)

    by_patience = {patience: simulate(patience) for patience in PATIENCES}
    best = min(by_patience, key=lambda patience: by_patience[patience].quality)
    hurrying = [simulate(best, hurried) for hurried in _doubling(schedule.ranks)]
    chosen = min([plain, *by_patience.values(), *hurrying], key=lambda each: each.quality)
    if chosen is plain:
        return schedule
    return Schedule.from_codes(
        [schedule.codes[row] for row in chosen.rows],
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        metadata={**schedule.metadata, "name": f"{schedule.metadata['name']}, fitted"},
    )


class _ActionCosts(NamedTuple):
    """What every action of a schedule waits for and costs, by its index in ``codes``.

    Attributes:
        stage: its stage.
        awaits: the action that it waits for; if none, the index after the last one, which has always ended.
        delay: how long after the end of that action it can start.
        duration: how long it takes.
        change: the memory that it allocates at its start, or releases at its end if negative.
        owes: the weight gradient that an input gradient makes possible, or none.
        reader: the rank that waits for it.
        dispatch: how long a rank takes to start any action.
    """

    stage: list[int]
    awaits: list[int]
    delay: list[float]
    duration: list[float]
    change: list[float]
    owes: list[int]
    reader: list[int]
    dispatch: float


def _action_costs(schedule: Schedule, costs: StageCosts) -> _ActionCosts:
    codes, stages, actions = schedule.codes, schedule.stages, len(schedule.codes)
    stage, microbatch, kind = packed.stages(codes), packed.microbatches(codes), packed.types(codes)
    of_kind = {each: np.flatnonzero(kind == packed.TYPE_NUMBER[each]) for each in _FIELDS}
    # The index of each action, with an empty stage at both ends: a missing action has always ended.
    at = {each: np.full((stages + 2, schedule.microbatches), actions) for each in _FIELDS}
    for each, mine in of_kind.items():
        at[each][stage[mine] + 1, microbatch[mine]] = mine

    activation, share = costs.per_stage("activation", stages), costs.per_stage("input_release", stages)
    early = activation * share
    changes = {FORWARD: activation, BACKWARD_INPUT: -early, BACKWARD_WEIGHT: early - activation}
    awaits, duration, change = np.full(actions, actions), np.zeros(actions), np.zeros(actions)
    for each, mine in of_kind.items():
        duration[mine] = costs.per_stage(_FIELDS[each], stages)[stage[mine]]
        change[mine] = changes[each][stage[mine]]
        for need in NEEDS[each]:  # the last one counts: it has itself waited for the others
            (provider,) = at.keys() & set(need.any_of)
            found = at[provider][stage[mine] + 1 + need.stage_offset, microbatch[mine]]
            awaits[mine] = np.where(found < actions, found, awaits[mine])
    delay, reader = _transfers(schedule, awaits, costs)
    owes, inputs = np.full(actions, _NONE), of_kind[BACKWARD_INPUT]
    owes[inputs] = at[BACKWARD_WEIGHT][stage[inputs] + 1, microbatch[inputs]]
    return _ActionCosts(
        stage=stage.tolist(),
        awaits=awaits.tolist(),
        delay=delay.tolist(),
        duration=duration.tolist(),
        change=change.tolist(),
        owes=owes.tolist(),
        reader=reader.tolist(),
        dispatch=costs.dispatch,
    )


def _transfers(schedule: Schedule, awaits: Ints, costs: StageCosts) -> tuple[Floats, Ints]:
    """Return how long the input of each action is in flight, and which rank reads the output of each action."""
    stage = packed.stages(schedule.codes)
    rank = np.array(schedule.placement.rank_of)[stage]
    waiting = np.flatnonzero(awaits < len(awaits))
    waiting = waiting[rank[awaits[waiting]] != rank[waiting]]
    source, target = stage[awaits[waiting]], stage[waiting]
    forth, back = (costs.transfer(schedule.stages, backward=backward) for backward in (False, True))
    edge, delay, reader = np.minimum(source, target), np.zeros(len(rank)), rank.copy()
    delay[waiting] = np.where(source < target, forth[edge], back[edge])
    reader[awaits[waiting]] = rank[waiting]
    return delay, reader


class _Run(NamedTuple):
    """A simulated run: the order of every rank, its peak memory, and when it began and ended."""

    rows: list[list[int]]
    peaks: list[float]
    begins: list[float]
    ends: list[float]

    @property
    def quality(self) -> tuple[float, float]:
        """The span and the makespan, rounded so that the first of equal ones is the best."""
        span = max(end - begin for begin, end in zip(self.begins, self.ends, strict=True))
        return float(f"{span:.9g}"), float(f"{max(self.ends) - min(self.begins):.9g}")


class _Rank:
    """A rank while it is simulated.

    Attributes:
        order: the actions that it runs in this order.
        owes: the weight gradient of each action, to be run later; None if they are in the order.
        limit: the memory limit.
        patience: how long a gap must be to be filled, as a share of what fills it.
        hurried_from: the index in the order after which any gap is filled.
    """

    __slots__ = (
        "begin", "end", "held", "hurried_from", "limit", "order", "owed", "owes", "patience", "peak", "place", "ran"
    )  # fmt: skip

    def __init__(
        self, order: list[int], owes: Sequence[int] | None = None, limit: float = inf, patience: float = 1.0
    ) -> None:
        self.order, self.owes, self.limit, self.patience = order, owes, limit, patience
        self.hurried_from = len(order)
        self.place = 0
        self.owed: deque[int] = deque()
        self.ran: list[int] = []
        self.held = self.peak = 0.0
        self.begin = self.end = -inf

    def choose(self, now: float, ends: Sequence[float], actions: _ActionCosts) -> tuple[int, float]:
        """Return the action to run now, or none and when to look again."""
        if self.place == len(self.order):
            return (self.owed.popleft(), now) if self.owed else (_NONE, inf)
        due = self.order[self.place]
        ready = ends[actions.awaits[due]] + actions.delay[due]
        if self.owed and (self.held + actions.change[due] > self.limit or self._is_worth(ready - now, actions)):
            return self.owed.popleft(), now
        if ready > now:
            return _NONE, ready
        self.place += 1
        return due, now

    def _is_worth(self, gap: float, actions: _ActionCosts) -> bool:
        """Return whether to fill a gap with the weight gradient that has been owed the longest."""
        if gap <= 0:
            return False
        return self.place >= self.hurried_from or gap >= self.patience * actions.duration[self.owed[0]]

    def run(self, action: int, now: float, actions: _ActionCosts) -> None:
        """Start an action."""
        if not self.ran:
            self.begin = now
        self.end = now + actions.duration[action]
        self.ran.append(action)
        self.held += actions.change[action]
        self.peak = max(self.peak, self.held)
        if self.owes is not None and self.owes[action] != _NONE:
            self.owed.append(self.owes[action])


def _simulate(actions: _ActionCosts, ranks: list[_Rank]) -> _Run:
    """Let every rank run what it chooses, whenever it or a rank it waits for has started something."""
    ends = [inf] * len(actions.stage) + [-inf]
    looks = [(actions.dispatch, rank) for rank in range(len(ranks))]
    while looks:
        now, number = heappop(looks)
        rank = ranks[number]
        if now < rank.end + actions.dispatch:
            continue
        action, later = rank.choose(now, ends, actions)
        if action == _NONE:
            if later < inf:
                heappush(looks, (later, number))
            continue
        rank.run(action, now, actions)
        ends[action] = rank.end
        heappush(looks, (rank.end + actions.dispatch, number))
        reader = actions.reader[action]
        if reader != number and ranks[reader].end + actions.dispatch <= now:
            heappush(looks, (now, reader))  # it waits, and now knows for how long
    return _Run(
        [rank.ran for rank in ranks],
        [rank.peak for rank in ranks],
        [rank.begin for rank in ranks],
        [rank.end for rank in ranks],
    )


def _tail(order: list[int], actions: _ActionCosts) -> int:
    """Return where the order has only input gradients of the rank's first stage left, which no action here needs."""
    first, place = min(actions.stage[action] for action in order), len(order)
    while place and actions.owes[order[place - 1]] != _NONE and actions.stage[order[place - 1]] == first:
        place -= 1
    return place


def _doubling(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ..., and finally ``most``."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most
