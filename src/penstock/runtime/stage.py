"""A stage: the part of a model that one rank runs, and its work for one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from penstock.errors import StageError
from penstock.runtime.data_parallel import adapter_for
from penstock.runtime.engine import accumulate
from penstock.runtime.split_backward import SplitBackward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.data_parallel import DataParallel
    from penstock.runtime.step import Flight

#: Called after the backward of inputs; returns what computes the gradients of weights.
WeightGradients = Callable[[], Callable[[], None]]


class Stage:
    """One stage of a model, on this rank.

    Attributes:
        index: which stage of the pipeline it is.
        module: what it runs.
        device: where it runs, and where what it receives goes.
        dw_builder: for a module that computes the gradients of its weights itself: its backward leaves them out; after
            the backward of a microbatch ``dw_builder()`` is called and must return a function that computes them, which
            is called when the schedule says W.
        parallel: how the module's parameters are shared with other replicas of it, if they are.
    """

    def __init__(
        self,
        index: int,
        module: torch.nn.Module,
        *,
        device: torch.device | str | None = None,
        dw_builder: WeightGradients | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise StageError(f"stage {index} must be a torch.nn.Module, not {module!r}", stage=index)
        self.index = index
        self.module = module
        self.device = torch.device(device) if device is not None else _device_of(module)
        self.dw_builder = dw_builder
        self.parallel: DataParallel | None = adapter_for(module, index)
        self._split = SplitBackward()

    def backward(self, flight: Flight, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """B: the gradients of the inputs; those of the weights are added to ``.grad``."""
        if flight.roots:
            accumulate(flight.roots, gradients)
        if self.dw_builder:
            self.dw_builder()()
        return _taken(flight.inputs)

    def input_backward(
        self, flight: Flight, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], Callable[[], None]]:
        """I: the gradients of the inputs, and W as a function."""
        found, weight_backward = self._input_backward(flight, gradients)
        if self.parallel is None:
            return found, weight_backward
        return found, partial(self.parallel.weight_backward, weight_backward)

    def _input_backward(
        self, flight: Flight, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], Callable[[], None]]:
        if self.dw_builder:
            if flight.roots:
                accumulate(flight.roots, gradients)
            return _taken(flight.inputs), self.dw_builder()
        if not flight.roots:
            return [None] * len(flight.inputs), _nothing
        return self._split.input_backward(flight.roots, gradients, flight.inputs)

    def loss_root(self, loss: Any) -> tuple[Any, ...]:
        """Where the graph of a loss begins."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise StageError(f"loss_fn must return one number as a tensor, not {seen}", stage=self.index)
        return (get_gradient_edge(loss),) if loss.requires_grad else ()


def _taken(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of leaves, taken away from them."""
    found = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return found


def _nothing() -> None:
    """W of a stage without anything to do."""


def _device_of(module: torch.nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.get_default_device()
