"""A stage: the part of a model that one rank runs, and its work for one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.errors import StageError
from penstock.execution.autograd import gradient_edge, pop_gradients, run_backward, unshare_gradients
from penstock.execution.data_parallel import adapter_for
from penstock.execution.split_backward.split import SplitBackward
from penstock.execution.trees import map_tensors
from penstock.graph.heap import keep_all_freed_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.data_parallel.adapter import DataParallel
    from penstock.execution.step import InFlight

#: Called after the backward of inputs; returns a function that computes the gradients of weights.
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
        changes_inputs: whether the module modifies its inputs in place, e.g. starts with ``ReLU(inplace=True)``; found
            automatically where shapes are inferred.
        parallel: how the module's parameters are shared with other replicas of it, if they are.
    """

    def __init__(
        self,
        index: int,
        module: torch.nn.Module,
        *,
        device: torch.device | str | None = None,
        dw_builder: WeightGradients | None = None,
        changes_inputs: bool = False,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise StageError(f"stage {index} must be a torch.nn.Module, not {module!r}", stage=index)
        self.index = index
        self.module = module
        self.device = torch.device(device) if device is not None else _device_of(module)
        self.dw_builder = dw_builder
        self.parallel: DataParallel | None = adapter_for(module, index)
        self.changes_inputs = changes_inputs
        self._split = SplitBackward(adds_in_place=self.parallel is None)
        self._without_gradient: list[torch.Tensor] = []
        if self.device.type == "cpu":
            keep_all_freed_memory()

    def share_process(self) -> None:
        """Note that other ranks are threads of this process, and may have the same leaves."""
        self._split.adds_in_place = False

    def begin(self) -> None:
        """Begin a step."""
        parameters = self.module.parameters()
        self._without_gradient = [one for one in parameters if one.requires_grad and one.grad is None]

    def end(self) -> None:
        """End a step, even a failed one."""
        self._split.end_step()

    def fresh(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make leaves modifiable in place, for a stage that does so: as results of an operation."""
        fresh: tuple[Any, ...] = map_tensors(_fresh, args)
        return fresh

    def backward(self, flight: InFlight, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run B: return the gradients of the inputs; those of the weights are added to ``.grad``."""
        self._whole_backward(flight, gradients)
        if self.dw_builder:
            self.dw_builder()()
        return pop_gradients(flight.inputs)

    def _whole_backward(self, flight: InFlight, gradients: Sequence[torch.Tensor | None]) -> None:
        roots, known = _known(flight.roots, gradients)
        if roots:
            self._split.before_whole_backward()
            if self.parallel is None:
                run_backward(roots, known)
            else:
                self.parallel.run_backward("full", partial(run_backward, roots, known))
            self._own_gradients()

    def _own_gradients(self) -> None:
        if self._without_gradient:
            self._without_gradient = unshare_gradients(self._without_gradient)

    def input_backward(
        self, flight: InFlight, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], Callable[[], None]]:
        """Run I: return the gradients of the inputs, and W as a function."""
        found, weight_backward = self._input_backward(flight, gradients)
        if self.parallel is None:
            return found, weight_backward
        return found, partial(self.parallel.run_backward, "weight", weight_backward)

    def _input_backward(
        self, flight: InFlight, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], Callable[[], None]]:
        if self.dw_builder:
            self._whole_backward(flight, gradients)
            return pop_gradients(flight.inputs), self.dw_builder()
        roots, known = _known(flight.roots, gradients)
        if not roots:
            return [None] * len(flight.inputs), _nothing
        if self.parallel is None:
            found, left = self._split.input_backward(roots, known, flight.inputs)
        else:
            run = partial(self._split.input_backward, roots, known, flight.inputs)
            found, left = self.parallel.run_backward("input", run)
        self._own_gradients()
        return found, partial(self._weight_backward, left)

    def _weight_backward(self, left: Callable[[], None]) -> None:
        left()
        self._own_gradients()

    def loss_root(self, loss: Any, output: Any) -> tuple[Any, ...]:
        """Find the roots of a loss's graph; none if nothing that led to the output is trained."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise StageError(f"loss_fn must return one number as a tensor, not {seen}", stage=self.index)
        if loss.requires_grad:
            return (gradient_edge(loss),)
        if torch.is_grad_enabled() and _needs_gradients(output):
            raise StageError(
                "the loss does not depend on the output of the last stage, which requires a gradient; does loss_fn "
                "detach it, call .item() or run under no_grad?",
                stage=self.index,
            )
        return ()


def device_of(stages: Mapping[int, Stage]) -> torch.device:
    """Get the device of a rank: that of its first stage, or torch's default device without stages."""
    return next((stage.device for stage in stages.values()), torch.get_default_device())


def _known(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None]
) -> tuple[Sequence[GradientEdge], Sequence[torch.Tensor]]:
    """Select the roots that have a gradient; an output that the next stage does not use has none."""
    if len(gradients) == 1 and gradients[0] is not None:
        return roots, cast("Sequence[torch.Tensor]", gradients)
    if any(gradient is None for gradient in gradients):
        there = [gradient is not None for gradient in gradients]
        return list(compress(roots, there)), [gradient for gradient in gradients if gradient is not None]
    return (roots, cast("Sequence[torch.Tensor]", gradients)) if gradients else ((), ())


def _needs_gradients(value: Any) -> bool:
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return any(tensor.requires_grad for tensor in found)


class _Fresh(torch.autograd.Function):
    """A leaf's value as the result of an operation. In-place operations on a leaf, or a view of it, are refused.

    Changes also count for the leaf: autograd refuses them if the previous stage, on this rank, has saved it.
    """

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        """Return the same memory, not a view."""
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the same gradient."""
        return gradient


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Fresh.apply(tensor) if tensor.requires_grad and tensor.is_leaf else tensor  # type: ignore[no-untyped-call]
    return made


def _nothing() -> None:
    """Do nothing: the W of a stage without weight gradients."""


def _device_of(module: torch.nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.get_default_device()
