"""States the problem of cutting layers into stages in integers, so that sums are exact and ties are ties."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.planning.partition import PartitionProblem

#: Memory may exceed its limit by this share: rounding.
ROUNDING = Fraction(1, 10**9)


class Amounts(NamedTuple):
    """What a stage takes of its rank.

    Attributes:
        time: per microbatch.
        least: memory in any schedule.
        held: memory with the expected microbatches in flight.
    """

    time: int
    least: int
    held: int


class Units(NamedTuple):
    """How many units of the integers make 1."""

    time: int
    held: int
    transfer: int
    least: int


@dataclass(frozen=True, slots=True)
class CutProblem:
    """Layers to be cut into stages, in integers.

    Attributes:
        rank_of: the rank of each stage.
        ranks: the number of ranks.
        time: the time of all layers before each.
        least: the memory that they need in any schedule.
        held: for each stage, what they are expected to hold if they are in it.
        transfers: the time of transfers over the cut before each layer, there and back.
        limits: the most that each rank may take of ``least``.
        base: what each rank has to do beside its stages.
        together: groups of layers that one rank must hold.
        weights: how often a step takes the time of the busiest rank, and that of the longest stage.
        units: the units of these integers.
    """

    rank_of: tuple[int, ...]
    ranks: int
    time: list[int]
    least: list[int]
    held: list[list[int]]
    transfers: list[int]
    limits: list[int]
    base: tuple[int, ...]
    together: tuple[tuple[int, ...], ...]
    weights: tuple[int, int]
    units: Units

    @classmethod
    def of(cls, problem: PartitionProblem) -> Self:
        """Scale the costs to integers."""
        costs, layers, rank_of = problem.costs, problem.layers, problem.placement.rank_of
        halves = problem.splits or costs.backward is None
        fields = ("forward", "backward_input", "backward_weight") if halves else ("forward", "backward")
        time = _sums([exact(costs.per_stage(field, layers)) for field in fields])
        static, activation = exact(costs.per_stage("static", layers)), exact(costs.per_stage("activation", layers))
        ways = [exact(costs.transfer(layers, backward=backward)) for backward in (False, True)]
        weights = _weights(problem.memory_limit)
        held = []
        for rank, flight in zip(rank_of, exact(problem.in_flight), strict=True):
            held += [weights[rank] * (a + flight * b) for a, b in zip(static, activation, strict=True)]
        whole_time, time_unit = integers(time)
        whole_held, held_unit = integers(held)
        whole_transfers, transfer_unit = integers([Fraction(0), *_sums(ways)])
        whole_least, least_unit = integers(_sums([static, activation]))
        return cls(
            rank_of,
            problem.placement.ranks,
            [0, *accumulate(whole_time)],
            [0, *accumulate(whole_least)],
            [[0, *accumulate(whole_held[at : at + layers])] for at in range(0, len(whole_held), layers)],
            whole_transfers,
            [_limit(limit, least_unit, sum(whole_least)) for limit in problem.memory_limit],
            (0,) * problem.placement.ranks,
            problem.together,
            (problem.microbatches, problem.placement.ranks - 1),
            Units(time_unit, held_unit, transfer_unit, least_unit),
        )

    def for_memory(self) -> CutProblem:
        """Return the problem of exceeding the memory limits as little as possible: its times are what they need."""
        highest = max(self.limits)
        layers = len(self.time) - 1
        return replace(
            self,
            time=self.least,
            held=[[0] * (layers + 1)] * len(self.rank_of),
            transfers=[0] * layers,
            limits=[self.least[-1]] * self.ranks,
            base=tuple(highest - limit for limit in self.limits),
            weights=(1, 0),
        )

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.time) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    def order(self, value: tuple[int, int, int, int]) -> tuple[int, int, int]:
        """Return what is compared of a way to cut: the estimate of a step, the memory, the time in transfer."""
        time, longest, held, transfer = value
        return self.weights[0] * time + self.weights[1] * longest, held, transfer

    def of_stage(self, stage: int, begin: int, end: int) -> Amounts:
        """Return what a stage with these layers takes."""
        held = self.held[stage]
        return Amounts(self.time[end] - self.time[begin], self.least[end] - self.least[begin], held[end] - held[begin])


def exact(numbers: Iterable[float]) -> list[Fraction]:
    """Return numbers as they are written in decimal notation."""
    return [Fraction(repr(float(number))) for number in numbers]


def integers(numbers: Sequence[Fraction]) -> tuple[list[int], int]:
    """Scale numbers to integers; return them and the unit."""
    unit = math.lcm(*(number.denominator for number in numbers))
    return [int(number * unit) for number in numbers], unit


def _sums(lists: Sequence[Sequence[Fraction]]) -> list[Fraction]:
    return [sum(each, Fraction(0)) for each in zip(*lists, strict=True)]


def _weights(limits: Sequence[float]) -> list[Fraction]:
    """Return what a unit of memory counts on each rank: a share of its limit, or 1 if no rank has a limit."""
    if all(math.isinf(limit) for limit in limits):
        return [Fraction(1)] * len(limits)
    return [Fraction(0) if limit == 0 or math.isinf(limit) else 1 / exact([limit])[0] for limit in limits]


def _limit(limit: float, unit: int, total: int) -> int:
    """Return a limit in integers: of all layers together if there is none."""
    if math.isinf(limit):
        return total
    return min(total, math.floor(exact([limit])[0] * unit * (1 + ROUNDING)))
