"""Improves a partition against what its schedule costs, which the dynamic program over partitions cannot know."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import PlanError
from penstock.ir.numbers import whole_number
from penstock.planning.layers import Partition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.planning.partition import PartitionProblem

#: What a schedule costs, the smaller the better; several numbers are compared in order. None if no schedule fits.
Worth: TypeAlias = float | tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Improved:
    """The best partition found.

    Attributes:
        partition: the partition.
        value: what the evaluation said of it.
        evaluations: the number of partitions that were evaluated.
        is_local_optimum: whether no move of one or two cuts by a layer would improve it.
    """

    partition: Partition
    value: float | tuple[float, ...]
    evaluations: int
    is_local_optimum: bool


def improve(
    problem: PartitionProblem,
    evaluate: Callable[[Partition], Worth],
    *,
    starts: Sequence[Partition] | None = None,
    evaluations: int = 200,
    is_over: Callable[[], bool] = lambda: False,
) -> Improved:
    """Move one or two cuts by a layer as long as that helps, from the best of several starts.

    Never worse than any start that is evaluated: each is, before the first move. No partition is evaluated twice, and
    equal arguments give an equal result, unless ``is_over`` depends on the time.

    Args:
        problem: what the partitions are for; others than it allows are not evaluated.
        evaluate: what the best schedule for a partition costs.
        starts: where to begin; by default the best partitions of ``problem``, and the even one.
        evaluations: the most partitions to evaluate.
        is_over: asked after every evaluation; if true, the best so far is the result.

    Raises:
        PlanError: no schedule fits for any of the partitions evaluated.
    """
    search = _Search(problem, evaluate, whole_number("evaluations", evaluations, least=1), is_over)
    for each in default_starts(problem) if starts is None else starts:
        search.try_out(each)
    done: set[Partition] = set()
    while not search.is_over:
        start = search.best_outside(done)
        if start is not None:
            search.descend(start, done)
        elif search.fits or not search.try_another():
            break
    best = search.best_outside(set())
    if best is None or (value := search.worth[best]) is None:
        raise PlanError(
            f"no schedule fits into memory for any of {len(search.worth)} partitions; raise memory_limit",
            field="memory_limit",
            value=problem.memory_limit,
        )
    return Improved(best, value, len(search.worth), best in search.local_optima)


def default_starts(problem: PartitionProblem) -> tuple[Partition, ...]:
    """Return the best partitions by their score, and the even one if it is allowed."""
    best = problem.best().partitions
    even = Partition.even(problem.layers, problem.placement.stages)
    return best if even in best or problem.score(even) is None else (*best, even)


def neighbours(partition: Partition) -> Iterator[Partition]:
    """Yield the partitions with one or two cuts moved by a layer.

    >>> [near.sizes for near in neighbours(Partition.from_sizes([1, 2, 1]))]
    [(2, 1, 1), (1, 1, 2)]
    """
    cuts = range(1, partition.stages)
    for moved in (*combinations(cuts, 1), *combinations(cuts, 2)):
        for steps in product((-1, 1), repeat=len(moved)):
            bounds = list(partition.bounds)
            for cut, step in zip(moved, steps, strict=True):
                bounds[cut] += step
            if all(begin < end for begin, end in pairwise(bounds)):
                yield Partition(tuple(bounds))


class _Search:
    """What is known of partitions so far.

    Attributes:
        worth: what was evaluated, in that order.
        local_optima: the partitions that no move improves.
    """

    def __init__(
        self,
        problem: PartitionProblem,
        evaluate: Callable[[Partition], Worth],
        evaluations: int,
        is_over: Callable[[], bool],
    ) -> None:
        self.problem, self.evaluate, self.evaluations, self.ask = problem, evaluate, evaluations, is_over
        self.worth: dict[Partition, Worth] = {}
        self.local_optima: set[Partition] = set()
        self.is_over = False

    def try_out(self, partition: Partition) -> bool:
        """Evaluate a partition, unless the search is over; return whether it is known, perhaps from before."""
        if partition not in self.worth and not self.is_over:
            self.worth[partition] = self.evaluate(partition)
            self.is_over = len(self.worth) >= self.evaluations or self.ask()
        return partition in self.worth

    def order(self, partition: Partition) -> tuple[float, ...]:
        """Return what to compare: partitions without a schedule come last, those that need the least memory first."""
        worth = self.worth[partition]
        if worth is None:
            score = self.problem.score(partition)
            return (1.0, math.inf if score is None else score.memory)
        return (0.0, *(worth if isinstance(worth, tuple) else (worth,)))

    @property
    def fits(self) -> bool:
        """Whether any partition has a schedule."""
        return any(worth is not None for worth in self.worth.values())

    def try_another(self) -> bool:
        """Evaluate a neighbour of what is known, where memory is expected to be least; return whether there was one."""
        near = {each for known in self.worth for each in neighbours(known) if each not in self.worth}
        scored = ((self.problem.score(each), each) for each in near)
        left = [(score.memory, each) for score, each in scored if score is not None]
        return bool(left) and self.try_out(min(left)[1])

    def best_outside(self, excluded: set[Partition]) -> Partition | None:
        """Return the best partition that is not excluded, of equal ones the first; any one if none has a schedule."""
        left = [partition for partition in self.worth if partition not in excluded]  # in the order of evaluation
        return min(left, key=self.order, default=None)

    def descend(self, start: Partition, done: set[Partition]) -> None:
        """Move to the first better neighbour until there is none: the most promising ones are tried first."""
        here: Partition | None = start
        while here is not None:
            done.add(here)
            before, value = here, self.order(here)
            near = ((self.problem.score(each), each) for each in neighbours(here))
            allowed = [(score, each) for score, each in near if score is not None]
            if self.worth[here] is None:
                allowed.sort(key=lambda pair: (pair[0].memory, *pair))
            else:
                allowed.sort()
            here = next((each for _, each in allowed if self.try_out(each) and self.order(each) < value), None)
            if here is None and not self.is_over:
                self.local_optima.add(before)
