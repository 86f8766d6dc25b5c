"""The end of a stage from which several values leave: each goes over the links that carry it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import StageError
from penstock.execution.links import ABSENT
from penstock.execution.shared_memory import find_groups, has_memory
from penstock.execution.trees import map_tensors, tensors_in
from penstock.execution.value_spec import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.channel import Progress
    from penstock.execution.links import Give, LinkEnds, TakeGradients
    from penstock.execution.shared_memory import Kin
    from penstock.execution.step import Step
    from penstock.execution.value_spec import ValueSpec
    from penstock.ir.edges import Edge, Link


class OutputValues:
    """What leaves a stage: one value per edge that starts at it, and which of them go over each of its links.

    >>> from penstock.ir.edges import Edge, links
    >>> edges = (Edge(0, (1,)), Edge(0, (2,)), Edge(0, (1, 2)))
    >>> outputs = OutputValues(0, edges, links(edges))
    >>> outputs.payloads(outputs.values((10, 20, 30)))
    [(10, 30), (20, 30)]

    Args:
        stage: the stage.
        edges: all edges of the pipeline.
        links: all links of the pipeline.

    Attributes:
        stage: the stage.
        links: its links, by target.
        edges: the edges that start at it, in order.
    """

    def __init__(self, stage: int, edges: Sequence[Edge], links: Sequence[Link]) -> None:
        self.stage = stage
        self.links = [link for link in links if link.source == stage]
        numbers = [number for number, edge in enumerate(edges) if edge.source == stage]
        self.edges = [edges[number] for number in numbers]
        self._carried = [[numbers.index(number) for number in link.edges] for link in self.links]

    @property
    def is_plain(self) -> bool:
        """Whether its output is one value, which goes to one stage, with a gradient."""
        return len(self.edges) == 1 and len(self.links) == 1 and self.edges[0].gradient

    def values(self, output: Any) -> Sequence[Any]:
        """Get the values of an output; those of edges without a gradient are detached."""
        if len(self.edges) == 1:
            values = (output,)
        elif type(output) is tuple and len(output) == len(self.edges):
            values = output
        else:
            raise self._mismatch(output)
        if not torch.is_grad_enabled():
            return values
        return [
            value if edge.gradient else map_tensors(torch.Tensor.detach, value)
            for edge, value in zip(self.edges, values, strict=True)
        ]

    def payloads(self, values: Sequence[Any]) -> list[Any]:
        """Get what goes over each link: a value as it is, or a tuple of several."""
        return [
            values[carried[0]] if len(carried) == 1 else tuple([values[number] for number in carried])
            for carried in self._carried
        ]

    def find_kin(self, values: Sequence[Any], kin: Kin) -> Kin:
        """Find which tensors of the values share memory; a group of one must not be modified by any stage.

        Args:
            values: the values of an output.
            kin: the inputs of the stage that are kin.
        """
        leaves: list[torch.Tensor] = []
        takers: list[set[int]] = []
        for edge, value in zip(self.edges, values, strict=True):
            found = [tensor for tensor in tensors_in((value,)) if has_memory(tensor)]
            leaves += found
            takers += [set(edge.targets)] * len(found)
        groups = find_groups(leaves, kin)
        grouped = {number for group in groups for number in group}
        alone = [(number,) for number in range(len(leaves)) if number not in grouped and len(takers[number]) > 1]
        return [
            [leaves[number] for number in part]
            for group in (*groups, *alone)
            for part in ([group] if len(set[int]().union(*(takers[one] for one in group))) == 1 else _singly(group))
        ]

    def describe(self, output: Any, kin: Kin = ()) -> tuple[list[ValueSpec], list[list[bool]]]:
        """Describe what goes over each link, and whether a gradient may come back for each tensor of it."""
        if self.is_plain:
            spec = describe(output, kin)
            return [spec], [[True] * len(spec.tensors)]
        values = self.values(output)
        kin = self.find_kin(values, kin)
        counts = [len(tensors_in((value,))) for value in values]
        returning = [
            [self.edges[number].gradient for number in carried for _ in range(counts[number])]
            for carried in self._carried
        ]
        return [describe(payload, kin) for payload in self.payloads(values)], returning

    def _mismatch(self, output: Any) -> StageError:
        count = len(self.edges)
        edges = ", ".join(map(str, self.edges))
        found = f"a tuple of {len(output)}" if type(output) is tuple else f"a {type(output).__qualname__}"
        return StageError(
            f"stage {self.stage} returned {found}, but {count} edges start at it ({edges}); return a tuple of {count} "
            "values, in the order of the edges",
            stage=self.stage,
        )


class FanOut:
    """Passes each value of an output on over its links, and adds up the gradients of one that several stages took.

    Args:
        outputs: what leaves the stage.
        links: its links, in the order of ``outputs.links``.
        microbatches: how many microbatches there are.
        progress: shows what is waited for.
        modifiable: whether a later stage may modify its inputs in place.
    """

    def __init__(
        self,
        outputs: OutputValues,
        links: Sequence[LinkEnds],
        microbatches: int,
        progress: Progress,
        *,
        modifiable: bool = True,
    ) -> None:
        self._progress = progress
        self._outputs = outputs
        self._links = links
        self._base = outputs.stage * microbatches
        self._modifiable = modifiable

    def give(self, microbatch: int) -> Give:
        """Keep the values of an output for their targets."""
        slot, outputs, modifiable = self._base + microbatch, self._outputs, self._modifiable
        gives = [link.give(microbatch) for link in self._links]

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            if output is ABSENT:
                for give_one in gives:
                    give_one(step, ABSENT)
                return ()
            values, kin = outputs.values(output), step.kin
            if modifiable:
                step.kin = outputs.find_kin(values, kin)
            payloads = zip(gives, outputs.payloads(values), strict=True)
            roots = [root for give_one, payload in payloads for root in give_one(step, payload)]
            step.kin = kin
            unique, numbers = number_roots(roots)
            if len(unique) < len(roots):
                step.root_numbers[slot] = numbers
            return unique

        return give

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradients of the outputs: of each, the sum over its targets, in their order."""
        slot, progress = self._base + microbatch, self._progress
        takes = [
            (link.take_gradients(microbatch), link.awaits(microbatch, gradients=True))
            for link, described in zip(self._links, self._outputs.links, strict=True)
            if described.gradient
        ]

        def take(step: Step) -> Sequence[torch.Tensor | None]:
            found: list[torch.Tensor | None] = []
            for take_one, progress.awaited in takes:
                found += take_one(step)
            progress.awaited = None
            numbers = step.root_numbers.pop(slot, None)
            return found if numbers is None else add_up(found, numbers)

        return take


def number_roots(roots: Sequence[GradientEdge]) -> tuple[Sequence[GradientEdge], list[int]]:
    """Find the roots without duplicates, and which of them each one is."""
    places: dict[tuple[object, int], int] = {}
    numbers = [places.setdefault((root.node, root.output_nr), len(places)) for root in roots]
    if len(places) == len(roots):
        return roots, numbers
    return [roots[numbers.index(number)] for number in range(len(places))], numbers


def add_up(gradients: Sequence[torch.Tensor | None], numbers: Sequence[int]) -> list[torch.Tensor | None]:
    """Add up the gradients with the same number, in order; None where all of them are None.

    >>> add_up([torch.ones(1), None, torch.ones(1)], [0, 1, 0])
    [tensor([2.]), None]
    """
    sums: list[torch.Tensor | None] = [None] * (max(numbers, default=-1) + 1)
    for number, gradient in zip(numbers, gradients, strict=True):
        before = sums[number]
        sums[number] = gradient if before is None else before if gradient is None else before + gradient
    return sums


def _singly(numbers: Iterable[int]) -> list[tuple[int, ...]]:
    return [(number,) for number in numbers]
