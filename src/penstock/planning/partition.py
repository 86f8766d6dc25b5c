"""Cuts layers into stages for a placement, so that the busiest rank has as little to do as possible.

A partition is compared by three numbers, in this order:

1. an estimate of a step: for every microbatch the time that the busiest rank computes (F and B, or F, I and W, of all
   its stages), and for filling and draining the pipeline, for every other rank the time of the longest stage. With one
   stage per rank, that is best where the busiest rank has the least to do; with several, stages should be of even
   length, too;
2. the memory that the fullest rank holds with the expected number of microbatches in flight, as a share of its limit;
3. the time that a microbatch is in transfer, over all cuts between different ranks, there and back.

Transfers are not part of the first, since they do not take a rank's time. No rank may exceed its limit with what any
schedule needs: its static memory and one activation of each of its stages.

Numbers are added exactly, as the decimal numbers that they are written as: 0.1 + 0.2 equals 0.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from penstock.errors import CostsError, PlanError, SizeError
from penstock.ir.numbers import whole_number
from penstock.planning.cut_problem import CutProblem
from penstock.planning.cut_search import search
from penstock.planning.layers import Partition, check_counts, count_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.ir.placement import Placement
    from penstock.simulation.costs import Costs


class Score(NamedTuple):
    """How partitions are compared: the smaller, the better, in the order of the fields.

    Attributes:
        step: the estimate of a step.
        memory: the memory that the fullest rank is expected to hold: a share of its limit, or, if no rank has a limit,
            an amount.
        transfer: how long a microbatch is in transfer between ranks.
        time: how long the busiest rank computes per microbatch.
        longest: how long the longest stage does.
    """

    step: float
    memory: float
    transfer: float
    time: float
    longest: float


class Candidates(NamedTuple):
    """The best partitions.

    Attributes:
        partitions: the best first.
        scores: their scores.
        is_exact: whether no other partition has a better score. If not, the search has set partitions aside because
            there were too many to compare them all.
    """

    partitions: tuple[Partition, ...]
    scores: tuple[Score, ...]
    is_exact: bool


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """Layers with costs, to be cut into the stages of a placement.

    >>> from penstock.ir.placement import Placement
    >>> from penstock.simulation.costs import Costs
    >>> costs = Costs(forward=[1, 2, 2, 2, 2, 5], backward_input=0, backward_weight=0)
    >>> problem = PartitionProblem.of(costs, Placement.loop(3, 3))
    >>> found = problem.best(count=1)
    >>> found.partitions[0].sizes, found.scores[0].time
    ((3, 2, 1), 5.0)

    Attributes:
        costs: the costs of the layers.
        placement: which rank holds which stage.
        layers: the number of layers.
        microbatches: the number of microbatches of a step.
        memory_limit: the memory of each rank, static memory included; infinite if unlimited.
        in_flight: the expected number of microbatches in flight in each stage.
        splits: whether the backward is run as I and W.
        together: groups of layers that one rank must hold.
    """

    costs: Costs
    placement: Placement
    layers: int
    microbatches: int
    memory_limit: tuple[float, ...]
    in_flight: tuple[float, ...]
    splits: bool
    together: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        costs: Costs,
        placement: Placement,
        *,
        layers: int | None = None,
        microbatches: int | None = None,
        memory_limit: float | Sequence[float] | None = None,
        in_flight: float | Sequence[float] | None = None,
        splits: bool = True,
        together: Iterable[Iterable[int]] = (),
    ) -> Self:
        """Check the arguments.

        Args:
            costs: a number per layer, or one for all; for transfers and values that wait, one per cut.
            placement: which rank holds which stage.
            layers: the number of layers; by default it follows from the costs.
            microbatches: the number of microbatches of a step; by default four for each rank.
            memory_limit: the memory of every rank, or one for each.
            in_flight: how many microbatches are expected in flight, for every stage or one for each; by default as
                many as 1F1B has on average: from one per rank at the first stage down to almost none at the last.
            splits: whether the backward is run as I and W.
            together: groups of layers that one rank must hold, such as those with tied weights.
        """
        layers = count_layers(costs) if layers is None else whole_number("layers", layers, least=1)
        check_counts(layers, placement.stages)
        costs.check(layers)
        ranks, stages = placement.ranks, placement.stages
        limit = _each("memory_limit", math.inf if memory_limit is None else memory_limit, ranks, "rank")
        microbatches = whole_number("microbatches", 4 * ranks if microbatches is None else microbatches, least=1)
        expected = [min(ranks * (stages - stage) / stages, microbatches) for stage in range(stages)]
        flight = _each("in_flight", expected if in_flight is None else in_flight, stages, "stage")
        groups = tuple(_group(each, layers) for each in together)
        return cls(costs, placement, layers, microbatches, limit, flight, bool(splits), groups)

    def score(self, partition: Partition) -> Score | None:
        """Return the score of a partition; None if it breaks a memory limit or separates layers of a group."""
        if (partition.layers, partition.stages) != (self.layers, self.placement.stages):
            raise SizeError(
                f"the partition has {partition.layers} layers in {partition.stages} stages, but there are "
                f"{self.layers} layers and {self.placement.stages} stages",
                field="partition",
                value=partition,
            )
        rank_of = self.placement.rank_of
        for group in self.together:
            if len({rank_of[partition.stage_of(layer)] for layer in group}) > 1:
                return None
        time, least, held = ([0] * self.placement.ranks for _ in range(3))
        longest = 0
        for stage, (begin, end) in enumerate(pairwise(partition.bounds)):
            rank = rank_of[stage]
            amounts = self._cuts.of_stage(stage, begin, end)
            longest = max(longest, amounts.time)
            for total, amount in zip((time, least, held), amounts, strict=True):
                total[rank] += amount
        if any(map(int.__gt__, least, self._cuts.limits)):
            return None
        crossing = (cut for stage, cut in enumerate(partition.cuts) if rank_of[stage] != rank_of[stage + 1])
        transfer = sum(self._cuts.transfers[cut] for cut in crossing)
        return self._to_score((max(time), longest, max(held), transfer))

    def best(self, count: int = 10, *, most_states: int = 1000) -> Candidates:
        """Return the best partitions, as many as requested if there are as many.

        Args:
            count: how many.
            most_states: how many incomplete partitions to keep at most. With one stage per rank, all are kept, since
                they are few. In a V with two, this limits large problems only. Otherwise their number grows
                exponentially with the ranks.

        Raises:
            PlanError: no partition fits into memory, or has the layers of each group on one rank.
        """
        count = whole_number("count", count, least=1)
        found = search(self._cuts, count, most_states)
        if not found.solutions:
            raise self._infeasible()
        return Candidates(
            tuple(Partition(solution.bounds) for solution in found.solutions),
            tuple(self._to_score(solution.value) for solution in found.solutions),
            found.is_exact,
        )

    def least_busy(self) -> tuple[float, bool]:
        """Return how long the busiest rank computes per microbatch in any partition at least, and if that is exact."""
        found = search(replace(self._cuts, weights=(1, 0)), 1, 1000)
        if not found.solutions:
            raise self._infeasible()
        return float(Fraction(found.solutions[0].value[0], self._cuts.units.time)), found.is_exact

    @cached_property
    def _cuts(self) -> CutProblem:
        """The problem in integers."""
        return CutProblem.of(self)

    def _to_score(self, value: tuple[int, int, int, int]) -> Score:
        units = self._cuts.units
        step, held, transfer = self._cuts.order(value)
        numbers = (step, held, transfer, value[0], value[1])
        scales = (units.time, units.held, units.transfer, units.time, units.time)
        return Score(*(float(Fraction(number, scale)) for number, scale in zip(numbers, scales, strict=True)))

    def _infeasible(self) -> PlanError:
        """Explain what makes the problem infeasible."""
        least = search(self._cuts.for_memory(), 1, 20_000)
        if not least.solutions:
            groups = ", ".join(map(str, self.together))
            return PlanError(
                f"no partition of {self.layers} layers into {self.placement.stages} stages has the layers of each "
                f"group on one rank: {groups}; place more stages on that rank, e.g. as a V, or change together=",
                field="together",
                value=self.together,
            )
        partition = Partition(least.solutions[0].bounds)
        needed = self._least_memory(partition)
        excess = [have - limit for have, limit in zip(needed, self.memory_limit, strict=True)]
        rank = int(np.argmax(excess))
        words = "at least" if least.is_exact else "probably"
        layers = [f"{a} to {b - 1}" for s, (a, b) in enumerate(pairwise(partition.bounds)) if self._is_on(s, rank)]
        return PlanError(
            f"no partition fits into memory: rank {rank} needs {words} {needed[rank]:g} of its limit "
            f"{self.memory_limit[rank]:g}, for its static memory and one activation of each stage (layers "
            f"{', '.join(layers)}); raise memory_limit to {needed[rank]:g}, or use more ranks",
            field="memory_limit",
            value=self.memory_limit[rank],
            smallest=needed[rank],
            rank=rank,
        )

    def _is_on(self, stage: int, rank: int) -> bool:
        return self.placement.rank_of[stage] == rank

    def _least_memory(self, partition: Partition) -> list[float]:
        """Return what each rank needs in any schedule."""
        unit = self._cuts.units.least
        totals = [0] * self.placement.ranks
        for stage, (begin, end) in enumerate(pairwise(partition.bounds)):
            totals[self.placement.rank_of[stage]] += self._cuts.of_stage(stage, begin, end).least
        return [float(Fraction(total) / unit) for total in totals]


def _each(field: str, given: float | Sequence[float], count: int, what: str) -> tuple[float, ...]:
    """Return a number for each rank or stage."""
    try:
        numbers = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise CostsError(f"{field} must be a number, got {given!r}", field=field, value=given) from None
    if numbers.shape not in ((), (count,)):
        raise CostsError(
            f"{field} has {numbers.size} numbers, but there are {count} {what}s; pass one for each, or a single number "
            "for all",
            field=field,
            value=given,
        )
    if not (numbers >= 0).all():
        raise CostsError(f"{field} must be at least 0, got {given!r}", field=field, value=given)
    if field == "in_flight" and not np.isfinite(numbers).all():
        raise CostsError(f"{field} must be finite, got {given!r}", field=field, value=given)
    return tuple(np.broadcast_to(numbers, (count,)).tolist())


def _group(layers_together: Iterable[int], layers: int) -> tuple[int, ...]:
    return tuple(sorted({whole_number("together", layer, most=layers - 1) for layer in layers_together}))
