"""The two ends of a pipeline: the batch that goes in, and the loss that comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import StageError
from penstock.execution.autograd import run_backward
from penstock.execution.links import ABSENT, LastEnd
from penstock.execution.shared_memory import find_groups, has_memory, watch_shared
from penstock.execution.trees import flat_tuple, map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.execution.links import Give, GiveGradients, Take, TakeGradients
    from penstock.execution.shared_memory import SharedInputs
    from penstock.execution.stage import Stage
    from penstock.execution.step import Step

    LossFunction = Callable[[Any, Any], torch.Tensor]


class BatchInputs:
    """The end of the first stage: what ``step`` was called with."""

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""

        def take(step: Step) -> Any:
            if microbatch >= len(step.args):
                return None
            return step.args[microbatch], (), step.shared_args[microbatch] if step.shared_args else None

        return take

    def give_gradients(self, microbatch: int) -> GiveGradients:  # noqa: ARG002  # the same for all
        """Leave gradients where they are: ``DetachedInputs`` collects them after the step."""
        return lambda *_: None


class NoInputs:
    """The end of a later stage that no link enters: it gets keyword arguments only."""

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with: no arguments, if the microbatch exists."""
        return lambda step: ((), (), None) if microbatch < len(step.args) else None

    def give_gradients(self, microbatch: int) -> GiveGradients:  # noqa: ARG002  # the same for all
        """Do nothing: no stage waits for gradients."""
        return lambda *_: None


class NoOutputs:
    """The end of an earlier stage that no link leaves: its output goes nowhere."""

    def give(self, microbatch: int) -> Give:  # noqa: ARG002  # the same for all
        """Let go of an output."""
        return lambda *_: ()

    def take_gradients(self, microbatch: int) -> TakeGradients:  # noqa: ARG002  # the same for all
        """Get no gradients: nothing depends on the output."""
        return lambda _: ()


class LossHead(LastEnd):
    """The end of the last stage: outputs to keep, and their loss."""

    def __init__(self, stage: Stage, loss_fn: LossFunction | None) -> None:
        self._stage = stage
        self._loss_fn = loss_fn

    def give(self, microbatch: int) -> Give:
        """Keep an output, and compute its loss."""
        stage, loss_fn = self._stage, self._loss_fn

        def give(step: Step, output: Any) -> Any:
            if step.outputs is not None:
                step.outputs[microbatch] = output if output is ABSENT else detach_all(output)
            if loss_fn is None or output is ABSENT:
                return ()
            if step.samples:
                step.check_samples(microbatch)
            loss = compute_loss(loss_fn, output, step.targets[microbatch])
            roots = stage.loss_root(loss, output)
            if step.on_loss is not None:
                step.on_loss(microbatch, loss)
            step.losses[microbatch] = loss = loss.detach()
            if roots:
                # One for each microbatch: a node of the graph, or a hook, may modify it in place.
                step.seeds[microbatch] = (torch.full_like(loss, step.shares[microbatch]),)
            return roots

        return give


def compute_loss(loss_fn: LossFunction, output: Any, target: Any) -> torch.Tensor:
    """Compute the loss of a microbatch; name a target that is missing."""
    try:
        return loss_fn(output, target)
    except Exception as error:
        if target is not None:
            raise
        raise StageError(
            f"loss_fn raised {type(error).__name__}: {error}; it was called without a target: pass target= on the rank "
            "of the last stage"
        ) from error


def detach_all(output: Any) -> Any:
    """Detach every tensor of a value from the graph that made it."""
    return map_tensors(torch.Tensor.detach, output)


class DetachedInputs:
    """The arguments of every microbatch, as leaves.

    Several microbatches may come from one graph, e.g. slices of one tensor, and a graph can be run backward once. So
    each microbatch ends at leaves, and ``backward`` runs the graph before them once, for all.

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
        """Pass the gradients of the leaves to the tensors that they replace."""
        pairs = [(origin, leaf.grad) for origin, leaf in self._pairs if leaf.grad is not None]
        if pairs:
            run_backward(
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
    return watch_shared(flat_tuple(len(tensors)), tensors, find_groups(tensors))
