"""Groups layers into stages: a partition of a chain of layers, and the costs of its stages.

A layer is what stages consist of, such as an embedding, a transformer block or a head. Their costs are ``Costs``, too:
a sequence has a number per layer, or one per cut between consecutive layers instead of one per edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import CostsError, SizeError
from penstock.ir.numbers import whole_number
from penstock.simulation.costs import OF_A_STAGE, OF_AN_EDGE, Costs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.simulation.costs import Amount

_PER_LAYER: Final = (*OF_A_STAGE, "input_release")


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """Which layers are in which stage: consecutive ones, at least one in each stage.

    >>> partition = Partition.from_sizes([3, 2, 1])
    >>> partition.bounds, partition.cuts, partition.layers, partition.stages
    ((0, 3, 5, 6), (3, 5), 6, 3)
    >>> partition.group(["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"])
    (('embed', 'layers.0', 'layers.1'), ('layers.2', 'layers.3'), ('head',))

    Attributes:
        bounds: the first layer of every stage, and finally the number of layers.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(whole_number("bounds", each) for each in self.bounds))
        if self.bounds[:1] != (0,) or len(self.bounds) < 2:
            raise SizeError(
                f"bounds must be 0, then where each further stage begins, then the number of layers, e.g. (0, 3, 6), "
                f"got {self.bounds}",
                field="bounds",
                value=self.bounds,
            )
        for stage, (begin, end) in enumerate(pairwise(self.bounds)):
            if end <= begin:
                raise SizeError(
                    f"stage {stage} would begin at layer {begin} and end before layer {end}; every stage needs at "
                    "least one layer",
                    field="bounds",
                    value=self.bounds,
                )

    @classmethod
    def from_sizes(cls, sizes: Iterable[int]) -> Partition:
        """Build from the number of layers of each stage."""
        return cls((0, *accumulate(sizes)))

    @classmethod
    def even(cls, layers: int, stages: int) -> Partition:
        """Give every stage as many layers, or one more: the stages in the middle, since the ends are often heavy.

        >>> Partition.even(10, 4).sizes
        (2, 3, 3, 2)
        """
        check_counts(layers, stages)
        least, left = divmod(layers, stages)
        first = (stages - left) // 2
        return cls.from_sizes(least + (first <= stage < first + left) for stage in range(stages))

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.bounds[-1]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.bounds) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(end - begin for begin, end in pairwise(self.bounds))

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return self.bounds[1:-1]

    def stage_of(self, layer: int) -> int:
        """Return the stage of a layer."""
        layer = whole_number("layer", layer, most=self.layers - 1)
        return next(stage for stage, end in enumerate(self.bounds[1:]) if layer < end)

    def group(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the names of the layers of each stage."""
        if len(names) != self.layers:
            raise SizeError(
                f"{len(names)} names are given for {self.layers} layers; pass one for each", field="names", value=names
            )
        return tuple(tuple(names[begin:end]) for begin, end in pairwise(self.bounds))


def check_counts(layers: int, stages: int) -> None:
    """Raise ``SizeError`` unless every stage can have a layer."""
    whole_number("stages", stages, least=1)
    if whole_number("layers", layers, least=1) < stages:
        raise SizeError(
            f"{stages} stages need at least {stages} layers, but there {'is' if layers == 1 else 'are'} {layers}; use "
            f"at most {layers} stages, or give the costs of smaller layers",
            field="stages",
            value=stages,
        )


def count_layers(costs: Costs) -> int:
    """Return the number of layers, which follows from any field with several numbers.

    >>> count_layers(Costs(forward=[2, 1, 1, 3], activation=1))
    4
    """
    counts = {field: len(value) for field in _PER_LAYER if isinstance(value := getattr(costs, field), tuple)}
    counts |= {field: len(value) + 1 for field in OF_AN_EDGE if isinstance(value := getattr(costs, field), tuple)}
    if not counts:
        raise CostsError("the number of layers is unknown: no field of the costs has a number per layer; pass layers=")
    layers = next(iter(counts.values()))
    costs.check(layers)
    return layers


def stage_costs(costs: Costs, partition: Partition) -> Costs:
    """Return the costs of the stages of a partition, given those of its layers.

    What the layers of a stage take adds up, ``input_release`` as a share of their activations. An edge between two
    stages costs what the cut between their layers does. A field with a single number has it for every layer, or cut.

    No gradient leaves the first stage. So if I of the first layer takes no time, because its inputs need no gradient,
    then the first stage has no I either: its W is the whole backward.

    >>> costs = Costs(forward=[1, 1, 1, 4], activation=2, latency=[0.1, 0.2, 0.3])
    >>> grouped = stage_costs(costs, Partition((0, 3, 4)))
    >>> grouped.forward, grouped.activation, grouped.latency
    ((3.0, 4.0), (6.0, 2.0), (0.3,))
    """
    costs.check(partition.layers)
    given = {field.name: getattr(costs, field.name) for field in fields(costs)}
    summed = {field: _sums(given[field], partition) for field in OF_A_STAGE if given[field] is not None}
    summed |= _without_first_input(costs, partition, summed)
    at_cuts = {
        field: tuple(given[field][cut - 1] for cut in partition.cuts)
        for field in OF_AN_EDGE
        if isinstance(given[field], tuple)
    }
    grouped = {**given, **summed, **at_cuts}
    if not any(map(np.any, (grouped["activation_bytes"], grouped["gradient_bytes"] or 0.0))):
        grouped["bandwidth"] = None  # costs without bytes have none
    return Costs(**{**grouped, "input_release": _shares(costs, partition)})


def _sums(value: Amount, partition: Partition) -> Amount:
    if isinstance(value, float):
        if len(set(partition.sizes)) == 1:
            return value * partition.sizes[0]
        return tuple(value * size for size in partition.sizes)
    return tuple(math.fsum(value[begin:end]) for begin, end in pairwise(partition.bounds))


def _without_first_input(costs: Costs, partition: Partition, summed: Mapping[str, Amount]) -> dict[str, Amount]:
    """Return I and W of the stages if the first one has no I."""
    inputs, weights = summed["backward_input"], summed["backward_weight"]
    if costs.per_stage("backward_input", partition.layers)[0] or not isinstance(inputs, tuple) or not inputs[0]:
        return {}
    weights = weights if isinstance(weights, tuple) else (weights,) * partition.stages
    return {"backward_input": (0.0, *inputs[1:]), "backward_weight": (weights[0] + inputs[0], *weights[1:])}


def _shares(costs: Costs, partition: Partition) -> Amount:
    """Return the share of the activations of each stage that its I releases."""
    if isinstance(costs.input_release, float):
        return costs.input_release
    amounts = costs.per_stage("activation", partition.layers).tolist()
    return tuple(_mean(costs.input_release[begin:end], amounts[begin:end]) for begin, end in pairwise(partition.bounds))


def _mean(shares: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of shares, the plain mean if nothing has weight."""
    if len(set(shares)) == 1:
        return shares[0]
    total = math.fsum(weights)
    if total == 0:
        return math.fsum(shares) / len(shares)
    return min(math.fsum(share * (weight / total) for share, weight in zip(shares, weights, strict=True)), 1.0)
