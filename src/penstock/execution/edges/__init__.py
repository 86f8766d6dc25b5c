"""How values get from one stage to the next, and gradients back.

An edge makes, for each microbatch, the functions that the operations of a rank are built from: *give* and *take* at the
ends of the stages, *send* and *receive* for transfers between ranks. What can be known beforehand is worked out when
they are made; they run once per microbatch and step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.autograd.graph import GradientEdge

from penstock.errors import StageError
from penstock.execution.autograd import gradient_edge
from penstock.execution.shared_memory import SharedInputs, WatchedInputs, watch_shared
from penstock.execution.step import Operation, Step
from penstock.execution.value_spec import TensorSpec

if TYPE_CHECKING:
    from penstock.execution.value_spec import ValueSpec

Tensors = Sequence[torch.Tensor]
#: What a stage is called with, which tensors of it need a gradient, and those that it must not modify in place, if any;
#: None if there is no such microbatch.
Taken = tuple[tuple[Any, ...], Tensors, SharedInputs | WatchedInputs | None] | None
Take = Callable[[Step], Taken]
#: Takes an output; returns where its graph begins.
Give = Callable[[Step, Any], Sequence[GradientEdge]]
TakeGradients = Callable[[Step], Sequence[torch.Tensor | None]]
GiveGradients = Callable[[Step, Sequence[torch.Tensor | None], Tensors], None]

#: What goes on instead of a value where a batch has fewer samples than there are microbatches.
ABSENT: Final = "\0no microbatch"


class Inbound(Protocol):
    """Where the inputs of a stage come from, and their gradients go."""

    def take(self, microbatch: int) -> Take:
        """For the beginning of a forward."""

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """For the end of a backward."""

    def receive(self, microbatch: int) -> Operation | None:
        """RECV_F; None if there is nothing to do."""

    def send_gradients(self, microbatch: int) -> Operation | None:
        """SEND_B; None if there is nothing to do."""


class Outbound(Protocol):
    """Where the outputs of a stage go, and their gradients come from."""

    def give(self, microbatch: int) -> Give:
        """For the end of a forward."""

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """For the beginning of a backward."""

    def send(self, microbatch: int) -> Operation | None:
        """SEND_F; None if there is nothing to do."""

    def receive_gradients(self, microbatch: int) -> Operation | None:
        """RECV_B; None if there is nothing to do."""


class Edge(Inbound, Outbound, Protocol):
    """The way from a stage to the next one."""


class FirstEnd:
    """The beginning of a pipeline: what all such ends have in common."""

    def receive(self, microbatch: int) -> None:
        """RECV_F: nothing is received."""

    def send_gradients(self, microbatch: int) -> None:
        """SEND_B: no stage waits for gradients."""


class LastEnd:
    """The end of a pipeline: backwards begin with the gradient of the loss."""

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradient of the loss."""
        return lambda step: step.seeds.pop(microbatch, ())

    def send(self, microbatch: int) -> None:
        """SEND_F: no stage waits for outputs."""

    def receive_gradients(self, microbatch: int) -> None:
        """RECV_B: nothing is received."""


def as_arguments(value: Any) -> tuple[Any, ...]:
    """What the next stage is called with: the elements of a tuple, or the value."""
    return value if type(value) is tuple else (value,)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor has been changed in place; None if that is not counted."""
    return None if tensor.is_inference() else tensor._version


def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """A tensor that a stage returned, and its version; a copy if changes of it are not counted."""
    if not tensor.is_inference():
        return tensor, tensor._version
    with torch.inference_mode(False):
        copy = tensor.clone()
    return copy, copy._version


def check_unchanged(tensor: torch.Tensor, version: int | None) -> None:
    """Refuse what a stage has changed after it returned it, for what has been received may be either."""
    if version is not None and tensor._version != version:
        raise StageError(
            f"a stage modified a tensor ({TensorSpec.of(tensor)}) in place after returning it, while it was still "
            "being sent; return a clone"
        )


def guard(meta: ValueSpec, inputs: Tensors, *, modifiable: bool) -> SharedInputs | WatchedInputs | None:
    """What to check after a stage has run with these inputs; None if it may modify all of them."""
    if modifiable:
        return watch_shared(meta.structure, inputs, meta.shared) if meta.shared else None
    return WatchedInputs(meta.structure, inputs) if len(inputs) > 1 else None


def roots_of(tensors: Tensors) -> list[GradientEdge]:
    """Where the graphs of tensors that need a gradient begin."""
    return [gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


def fill_missing(gradients: Sequence[torch.Tensor | None], inputs: Tensors) -> Tensors:
    """The gradients, with zeros for an input that nothing depends on."""
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    ]


def to_layout_of(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient in the layout of its tensor, which is what the other side expects."""
    if gradient.stride() == tensor.stride() and not (gradient.is_conj() or gradient.is_neg()):
        return gradient
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(gradient)
