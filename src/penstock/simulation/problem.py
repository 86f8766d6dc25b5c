"""Defines what a schedule is sought for: stages with costs on ranks with memory limits, as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from penstock.errors import CostsError
from penstock.ir.edges import chain, checked_edges, is_chain, links
from penstock.ir.numbers import whole_number
from penstock.simulation.link_costs import link_costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.ir.edges import Edge, Link
    from penstock.ir.placement import Placement
    from penstock.simulation.costs import Costs

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


class Inputs(NamedTuple):
    """Which stages every stage waits for in one direction, stage by stage.

    Attributes:
        first: where the entries of each stage begin in the other two; one more than there are stages.
        stage: the stage that provides the input.
        delay: how long it is in flight; 0 between two stages of one rank.
    """

    first: Ints
    stage: Ints
    delay: Floats


@dataclass(frozen=True, eq=False)
class Problem:
    """Stages with costs on ranks with memory limits, and the number of microbatches to run.

    A stage whose backward is not split runs B: here it is an I that takes as long as B and releases everything, and
    there is no W. So forward, input and weight describe all stages.

    >>> from penstock.ir.placement import Placement
    >>> from penstock.simulation.costs import Costs
    >>> problem = Problem.of(Costs(latency=0.5), Placement.v(2, 4), microbatches=3, memory_limit=2.5)
    >>> problem.budget, problem.forward_inputs.delay, problem.backward_inputs.stage
    (array([2.5, 2.5]), array([0.5, 0. , 0.5]), array([1, 2, 3]))

    Attributes:
        placement: which rank holds which stage.
        microbatches: the number of microbatches of a step.
        costs: what the actions cost.
        edges: which value goes from which stage to which.
        memory_limit: the memory of each rank, static memory included; infinite if unlimited.
        splits: whether the backward of each stage is split into I and W.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    edges: tuple[Edge, ...]
    memory_limit: Floats
    splits: Bools

    @classmethod
    def of(
        cls,
        costs: Costs,
        placement: Placement,
        *,
        microbatches: int,
        memory_limit: float | Sequence[float] | None = None,
        splits: bool | Sequence[bool] = True,
        edges: Sequence[Edge] | None = None,
    ) -> Self:
        """Check the arguments; a single ``memory_limit`` is for every rank, a single ``splits`` for every stage."""
        stages = placement.stages
        found = chain(stages) if edges is None else checked_edges(edges, stages)
        costs.check(stages, len(found))
        return cls(
            placement,
            whole_number("microbatches", microbatches, least=1),
            costs,
            found,
            _limits(memory_limit, placement.ranks),
            _flags(splits, stages),
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    @cached_property
    def rank_of(self) -> Ints:
        """The rank of each stage."""
        return np.array(self.placement.rank_of, np.int64)

    @property
    def dispatch(self) -> float:
        """The time from the end of an action to the earliest start of the next one on the same rank."""
        return self.costs.dispatch

    @cached_property
    def forward(self) -> Floats:
        """The time of F of each stage."""
        return self.costs.per_stage("forward", self.stages)

    @cached_property
    def input(self) -> Floats:
        """The time of I of each stage, or of B if its backward is not split."""
        return np.where(self.splits, self.costs.per_stage("backward_input", self.stages), self.whole)

    @cached_property
    def whole(self) -> Floats:
        """The time of B of each stage."""
        return self.costs.per_stage("backward", self.stages)

    @cached_property
    def weight(self) -> Floats:
        """The time of W of each stage; 0 if its backward is not split."""
        return np.where(self.splits, self.costs.per_stage("backward_weight", self.stages), 0.0)

    @cached_property
    def activation(self) -> Floats:
        """The memory that F of each stage takes."""
        return self.costs.per_stage("activation", self.stages)

    @cached_property
    def input_release(self) -> Floats:
        """The memory that I of each stage releases; W releases the rest."""
        share = np.where(self.splits, self.costs.per_stage("input_release", self.stages), 1.0)
        return np.asarray(self.activation * share)

    @cached_property
    def weight_release(self) -> Floats:
        """The memory that W of each stage releases."""
        return np.asarray(self.activation - self.input_release)

    @cached_property
    def static(self) -> Floats:
        """The memory that each rank always holds."""
        of_stages = self.costs.per_stage("static", self.stages)
        return np.bincount(self.rank_of, of_stages, self.ranks).astype(np.float64)

    @cached_property
    def budget(self) -> Floats:
        """The memory of each rank for activations."""
        return np.asarray(self.memory_limit - self.static)

    @cached_property
    def work(self) -> Floats:
        """How long each rank runs actions in a step."""
        of_stages = self.forward + self.input + self.weight
        return np.bincount(self.rank_of, of_stages * self.microbatches, self.ranks).astype(np.float64)

    @cached_property
    def forward_inputs(self) -> Inputs:
        """Whose F every F waits for."""
        return self._inputs(backward=False)

    @cached_property
    def backward_inputs(self) -> Inputs:
        """Whose I every I waits for, in addition to its own F."""
        return self._inputs(backward=True)

    @property
    def is_chain(self) -> bool:
        """Whether every stage passes its output to the next one and nowhere else."""
        return is_chain(self.edges, self.stages)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """What the stages send each other."""
        return links(self.edges)

    def _inputs(self, *, backward: bool) -> Inputs:
        of_links = link_costs(self.costs, self)
        times = (of_links.backward if backward else of_links.forward).time
        entries = sorted(
            (*((link.source, link.target) if backward else (link.target, link.source)), float(time))
            for link, time in zip(self.links, times, strict=True)
            if link.gradient or not backward
        )
        waiting = np.array([entry[0] for entry in entries], np.int64)
        stage = np.array([entry[1] for entry in entries], np.int64)
        delay = np.array([entry[2] for entry in entries], np.float64)
        delay[self.rank_of[waiting] == self.rank_of[stage]] = 0.0
        return Inputs(np.searchsorted(waiting, np.arange(self.stages + 1)), stage, delay)


def _flags(given: bool | Sequence[bool], stages: int) -> Bools:
    flags = np.asarray(given)
    if flags.dtype != np.bool_ or flags.shape not in ((), (stages,)):
        raise CostsError(
            f"whether backwards may be split must be True or False, or a list with one of them for each of the "
            f"{stages} stages, got {given!r}",
            field="splits",
            value=given,
        )
    return np.broadcast_to(flags, (stages,)).copy()


def _limits(given: float | Sequence[float] | None, ranks: int) -> Floats:
    if isinstance(given, bool):
        raise CostsError(f"memory_limit must be a number, got {given!r}", field="memory_limit", value=given)
    try:
        limits = np.asarray(math.inf if given is None else given, np.float64)
    except (TypeError, ValueError):
        raise CostsError(f"memory_limit must be a number, got {given!r}", field="memory_limit", value=given) from None
    if limits.shape not in ((), (ranks,)):
        raise CostsError(
            f"memory_limit has {limits.size} numbers, but there are {ranks} ranks; pass one for each, or a single "
            f"number for all",
            field="memory_limit",
            value=given,
        )
    if not (limits >= 0).all():
        raise CostsError(f"memory_limit must be at least 0, got {given!r}", field="memory_limit", value=given)
    return np.broadcast_to(limits, (ranks,)).copy()
