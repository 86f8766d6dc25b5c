"""Arguments of stages that need gradients: cut off from the graph that made them, and joined with it at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.autograd import accumulate
from penstock.execution.shared_memory import find_groups, guard, has_memory
from penstock.execution.trees import flat, map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.execution.shared_memory import SharedInputs


class Detached:
    """The arguments of every microbatch, as leaves.

    Several microbatches may come from one graph, e.g. slices of one tensor, and a graph can be run backward once. So
    each microbatch ends at leaves, and ``backward`` runs the graph behind them once, for all.

    Attributes:
        args: the positional arguments of each microbatch.
        kwargs: the keyword arguments of each microbatch.
        shared: those positional arguments of each microbatch that share memory; empty if none needs a gradient.
    """

    def __init__(self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.args: list[tuple[Any, ...]] = [self._cut(values) for values in args]
        self.shared = [_shared(values) for values in self.args] if self._pairs else []
        self.kwargs: list[dict[str, Any]] = [self._cut(values) for values in kwargs]

    def backward(self) -> None:
        """Give the gradients of the leaves to the tensors that they stand for."""
        pairs = [(origin, leaf.grad) for origin, leaf in self._pairs if leaf.grad is not None]
        if pairs:
            accumulate(
                [torch.autograd.graph.get_gradient_edge(origin) for origin, _ in pairs],
                [gradient for _, gradient in pairs],
            )

    def _cut(self, values: Any) -> Any:
        for tensor in tensors_in(values):
            if tensor.requires_grad:
                return map_tensors(self._leaf, values)
        return values

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        self._pairs.append((tensor, leaf))
        return leaf


def _shared(args: tuple[Any, ...]) -> SharedInputs | None:
    tensors = [tensor for tensor in tensors_in(args) if has_memory(tensor)]
    return guard(flat(len(tensors)), tensors, find_groups(tensors))
