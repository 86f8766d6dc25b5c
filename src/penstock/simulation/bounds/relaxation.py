"""Relaxes a problem to operations that run one after the other on their rank, and says which must precede which.

What is proved of the relaxation holds for every schedule of the problem, whichever backwards it fuses into B and
whatever it overlaps:

- A fused B is an I followed by its W. Together they take as long as B, so W takes what I leaves, if that is less.
- An OVERLAP_F_B is its F followed by its I. If it is shorter than its parts, every F, I and B is that much shorter.
- ``dispatch`` follows every I. It follows an F before what waits for that F, but not before other operations, as an
  overlap starts an F along with an I. It follows a W only as far as splitting takes longer than B.

Microbatches are alike. So sort the starts of each stage and type, and let the i-th be that of microbatch i. The i-th of
a stage still follows the i-th of what it waits for, because sorting two sequences keeps pairwise order, and memory
depends on numbers only. So it loses nothing to assume that every stage and type runs its microbatches in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.graph.jit import jit
from penstock.graph.longest_path import should_compile
from penstock.simulation.bounds.forced_work import forced_work
from penstock.simulation.bounds.memory_order import memory_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.simulation.problem import Problem

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

#: Nothing requires one operation to run before another.
UNRELATED: Final = -(2**40)


class Waits(NamedTuple):
    """What each operation waits for, operation by operation.

    Attributes:
        first: where the entries of each operation begin in the others; one more than there are operations.
        source: the operation that it waits for.
        shift: for which microbatch of it, relative to its own; never a later one.
        lag: how long after the start of the source it can start.
    """

    first: Ints
    source: Ints
    shift: Ints
    lag: Floats


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Operations, each run for every microbatch in order, and what they wait for.

    Those of stage s are numbered s, stages + s and 2 stages + s: its F, I and W.

    Attributes:
        microbatches: how often each operation runs.
        ranks: the number of ranks.
        rank: the rank of each operation.
        taken: how long each keeps its rank busy.
        order: the operations in an order in which no wait within a microbatch is for a later one.
        waits: what each waits for.
        trailing: the time at the end of the last operation of a rank that does not count.
        takes: the memory that each operation takes.
        releases: the memory that each operation releases.
        budget: the memory of each rank for activations.
    """

    microbatches: int
    ranks: int
    rank: Ints
    taken: Floats
    order: Ints
    waits: Waits
    trailing: float
    takes: Floats
    releases: Floats
    budget: Floats

    @cached_property
    def before(self) -> Ints:
        """For every two operations up to which microbatch of the second, relative to its own, the first follows."""
        return _closure(self.order, self.waits)

    @cached_property
    def forced(self) -> Floats:
        """The time of further operations that have to run before each operation and microbatch to release memory."""
        return forced_work(self)

    @cached_property
    def members(self) -> tuple[Ints, Ints]:
        """The operations rank by rank, and where those of each rank begin."""
        by_rank = np.argsort(self.rank, kind="stable")
        return by_rank, np.searchsorted(self.rank[by_rank], np.arange(self.ranks + 1))

    def members_of(self, rank: int) -> tuple[Ints, Ints]:
        """Return the operations of one rank, and where they begin and end."""
        here = np.flatnonzero(self.rank == rank)
        return here, np.array([0, len(here)])

    @property
    def impossible_rank(self) -> int | None:
        """A rank with an operation that would have to follow itself, if there is one."""
        impossible = np.flatnonzero(self.before.diagonal() >= 0)
        return int(self.rank[impossible[0]]) if len(impossible) else None

    @cached_property
    def reversed(self) -> Relaxation:
        """The relaxation with time running backwards: ends are starts, and the last microbatch the first.

        Memory is then taken by what released it.
        """
        first, source, shift, lag = self.waits
        target = np.repeat(np.arange(len(self.rank)), np.diff(first))
        turned = lag + self.taken[target] - self.taken[source]
        waits = _grouped(len(self.rank), source, target, shift, turned)
        order = self.order[::-1].copy()
        mirrored = replace(self, order=order, waits=waits, takes=self.releases, releases=self.takes)
        if "before" in self.__dict__:
            mirrored.__dict__["before"] = self.before.T.copy()
        return mirrored


def relax(problem: Problem) -> Relaxation:
    """Return the relaxation of a problem."""
    stages, dispatch = problem.stages, problem.dispatch
    overlap = min(1.0, problem.costs.overlap)
    whole = overlap * problem.costs.per_stage("backward", stages)
    forward, inward = overlap * problem.forward, np.minimum(overlap * problem.input, whole)
    weight = np.where(problem.splits, np.minimum(problem.weight + dispatch, whole - inward), 0.0)
    taken = np.concatenate([forward, inward + dispatch, weight])
    lasting = np.concatenate([forward, inward, weight])  # until the result is there
    rank = np.tile(problem.rank_of, 3)
    target, source, shift, delay = map(np.concatenate, zip(*_all_waits(problem), strict=True))
    spacing = taken + dispatch * (np.arange(3 * stages) < stages)  # no wait is within an overlap
    lag = np.where(rank[target] == rank[source], spacing[source], lasting[source] + delay)
    waits = _grouped(3 * stages, target, source, shift, lag)
    forwards, inputs, weights = np.arange(3 * stages).reshape(3, stages)
    order = np.concatenate([forwards, inputs[::-1], weights])
    none = np.zeros(stages)
    takes = np.concatenate([problem.activation, none, none])
    releases = np.concatenate([none, problem.input_release, problem.weight_release])
    sizes = (problem.microbatches, problem.ranks, rank, taken, order, waits, dispatch)
    return Relaxation(*sizes, takes, releases, problem.budget)


def _all_waits(problem: Problem) -> Iterator[tuple[Ints, Ints, Ints, Floats]]:
    """Yield targets, sources, shifts and delays of all waits, part by part."""
    stages = problem.stages
    forward, inward, weight = np.arange(3 * stages).reshape(3, stages)
    every = np.arange(3 * stages)
    yield every, every, np.full(3 * stages, -1), np.zeros(3 * stages)
    yield inward, forward, np.zeros(stages, np.int64), np.zeros(stages)
    yield weight, inward, np.zeros(stages, np.int64), np.zeros(stages)
    for offset, inputs in ((forward, problem.forward_inputs), (inward, problem.backward_inputs)):
        target = np.repeat(offset, np.diff(inputs.first))
        yield target, offset[inputs.stage], np.zeros(len(target), np.int64), inputs.delay
    for offset, needs in zip((forward, inward, weight), memory_order(problem), strict=True):
        stage, other, back = np.array(needs, np.int64).reshape(-1, 3).T
        yield forward[stage], offset[other], -back, np.zeros(len(stage))


def _grouped(operations: int, target: Ints, source: Ints, shift: Ints, lag: Floats) -> Waits:
    order = np.argsort(target, kind="stable")
    first = np.searchsorted(target[order], np.arange(operations + 1))
    return Waits(first, source[order], shift[order], lag[order])


def _closure(order: Ints, waits: Waits) -> Ints:
    """Return for every two operations up to which microbatch of the second, relative to its own, the first follows."""
    close = jit(_close) if should_compile(len(order) ** 2) else _close
    found: Ints = close(order, waits.first, waits.source, waits.shift)
    return found


def _close(order: Ints, first: Ints, source: Ints, shift: Ints) -> Ints:
    """Relax all waits until nothing changes, as in Bellman and Ford's algorithm, for all targets at once."""
    operations = len(order)
    before = np.full((operations, operations), UNRELATED, np.int64)
    changed = np.zeros(operations, np.int64)  # the last round in which the row of an operation changed
    for number in range(1, operations + 2):  # more rounds would only change what follows itself
        changes = False
        for operation in order:
            for entry in range(first[operation], first[operation + 1]):
                other, back = source[entry], shift[entry]
                if back > before[operation, other]:
                    before[operation, other] = back
                    changed[operation] = number
                if changed[other] >= number - 1:
                    for third in range(operations):
                        if before[other, third] + back > before[operation, third]:
                            before[operation, third] = before[other, third] + back
                            changed[operation] = number
            changes |= changed[operation] == number
        if not changes:
            break
    return before
