"""Links: pass values from one stage to another, and gradients back.

A link makes, for each microbatch, the functions that the operations of a rank are built from: *give* and *take* at the
ends of the stages, *send* and *receive* for transfers between ranks. What is known beforehand is computed when
they are built; they run once per microbatch and step.

A stage with one link on a side works with that link itself. Several links, or several values on one, meet in a
``FanIn`` or a ``FanOut``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

import torch
from torch.autograd.graph import GradientEdge

from penstock.errors import StageError
from penstock.execution.autograd import gradient_edge
from penstock.execution.shared_memory import WatchedInputs, watch_shared
from penstock.execution.step import Operation, Step
from penstock.execution.value_spec import TensorSpec

if TYPE_CHECKING:
    from penstock.execution.shared_memory import Kin
    from penstock.execution.value_spec import ValueSpec

Tensors = Sequence[torch.Tensor]


class Watched(Protocol):
    """Inputs of a stage that it must not modify in place.

    Attributes:
        tensors: those that share memory, in groups.
    """

    tensors: Kin

    def check(self) -> None:
        """Refuse a stage that has modified one of them."""


#: What a stage is called with, which tensors of it need a gradient, and those that it must not modify in place, if any;
#: None if the microbatch does not exist.
Taken = tuple[tuple[Any, ...], Tensors, Watched | None] | None
Take = Callable[[Step], Taken]
#: Takes an output; returns where its graph begins.
Give = Callable[[Step, Any], Sequence[GradientEdge]]
TakeGradients = Callable[[Step], Sequence[torch.Tensor | None]]
GiveGradients = Callable[[Step, Sequence[torch.Tensor | None], Tensors], None]

#: Replaces a value where a batch has fewer samples than there are microbatches.
ABSENT: Final = "\0no microbatch"


class Route(NamedTuple):
    """Which link it is, and how what goes over it reaches the target.

    Attributes:
        source: the stage that values come from.
        target: the stage that takes them.
        number: its place among all links of the pipeline.
        spread: whether a tuple that goes over it becomes arguments; else it is one argument, whatever it is.
        alone: whether no other value enters the target, and no other stage takes this one.
    """

    source: int
    target: int
    number: int
    spread: bool = True
    alone: bool = True

    @classmethod
    def in_chain(cls, stage: int) -> Self:
        """Make the link from a stage to the next one, in a chain."""
        return cls(stage, stage + 1, stage)

    @property
    def input_name(self) -> str:
        """What errors call the values that go over it, at the target."""
        return "input" if self.alone else f"input from stage {self.source}"

    def as_arguments(self, value: Any) -> tuple[Any, ...]:
        """Get the arguments of the target."""
        return as_arguments(value) if self.spread else (value,)


class Inbound(Protocol):
    """Where the inputs of a stage come from, and their gradients go."""

    def take(self, microbatch: int) -> Take:
        """Build what gets the inputs at the start of a forward."""

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Build what passes on the gradients at the end of a backward."""


class Outbound(Protocol):
    """Where the outputs of a stage go, and their gradients come from."""

    def give(self, microbatch: int) -> Give:
        """Build what passes on the output at the end of a forward."""

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Build what gets the gradients at the start of a backward."""


class LinkEnds(Inbound, Outbound, Protocol):
    """Both ends of a link, as far as they are on this rank."""

    route: Route

    def send(self, microbatch: int) -> Operation | None:
        """Build SEND_F; None if there is nothing to do."""

    def receive(self, microbatch: int) -> Operation | None:
        """Build RECV_F; None if there is nothing to do."""

    def send_gradients(self, microbatch: int) -> Operation | None:
        """Build SEND_B; None if there is nothing to do."""

    def receive_gradients(self, microbatch: int) -> Operation | None:
        """Build RECV_B; None if there is nothing to do."""

    def awaits(self, microbatch: int, *, gradients: bool) -> tuple[int, str] | None:
        """The rank that its value, or its gradients, come from, and the text of their receive; None from this rank."""


class LastEnd:
    """The end of a pipeline: backwards start with the gradient of the loss."""

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradient of the loss."""
        return lambda step: step.seeds.pop(microbatch, ())


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Get the next stage's arguments: the elements of a tuple, or the value."""
    return value if type(value) is tuple else (value,)


def version_of(tensor: torch.Tensor) -> int | None:
    """Get a tensor's version, which counts in-place changes; None if it has none."""
    return None if tensor.is_inference() else tensor._version


def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """Note a returned tensor and its version; copy it if it has no version."""
    if not tensor.is_inference():
        return tensor, tensor._version
    with torch.inference_mode(False):
        copy = tensor.clone()
    return copy, copy._version


def check_unchanged(tensor: torch.Tensor, version: int | None) -> None:
    """Refuse a tensor that was modified after it was returned: the receiver may have got either value."""
    if version is not None and tensor._version != version:
        raise StageError(
            f"a stage modified a tensor ({TensorSpec.of(tensor)}) in place after returning it, while it was still "
            "being sent; return a clone"
        )


def guard(meta: ValueSpec, inputs: Tensors, route: Route, *, modifiable: bool) -> Watched | None:
    """Find what to check after a stage has run with these inputs; None if it may modify all of them."""
    if modifiable:
        return watch_shared(meta.structure, inputs, meta.shared, route.input_name) if meta.shared else None
    if len(inputs) > 1 or (inputs and not route.alone):
        return WatchedInputs(meta.structure, inputs, route.input_name)
    return None


def roots_of(tensors: Tensors) -> list[GradientEdge]:
    """Get the edges at which the graphs of tensors that require a gradient begin."""
    return [gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


def fill_missing(gradients: Sequence[torch.Tensor | None], inputs: Tensors) -> Tensors:
    """Get the gradients, with zeros for an input that nothing depends on."""
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    ]


def to_layout_of(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Bring a gradient into the layout of its tensor, which the receiver expects."""
    if gradient.stride() == tensor.stride() and not (gradient.is_conj() or gradient.is_neg()):
        return gradient
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(gradient)
