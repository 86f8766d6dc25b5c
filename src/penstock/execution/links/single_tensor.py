"""A link between ranks that carries one tensor that requires a gradient, as most links do.

It does what ``NegotiatedLink`` does for any number of tensors, without lists of one, which take as long as the work on
their elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.autograd import gradient_edge
from penstock.execution.links import to_layout_of
from penstock.execution.links.negotiated import NegotiatedLink
from penstock.execution.value_spec import as_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.links import Give, GiveGradients, Take, TakeGradients, Taken, Tensors
    from penstock.execution.step import Operation, Step
    from penstock.execution.value_spec import TensorSpec, ValueSpec


def is_single(metas: Sequence[ValueSpec]) -> bool:
    """Whether a link carries one tensor that requires a gradient, for every microbatch."""
    return all(meta.is_single and meta.tensors[0].requires_grad for meta in metas)


class SingleTensorLink(NegotiatedLink):
    """Carries one tensor that requires a gradient."""

    def give(self, microbatch: int) -> Give:
        """Keep an output for the target."""
        key, meta = self._base + microbatch, self._metas[microbatch]
        (one,) = meta.tensors

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            if step.kin or not (isinstance(output, torch.Tensor) and one.matches(output)):
                self._check(step, meta, output)
            tensor = one.to_layout(output)
            step.outgoing[key] = tensor, tensor._version
            return (gradient_edge(output),)

        return give

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        key, progress = self._base + microbatch, self._channel.progress

        def take(step: Step) -> Taken:
            buffer, transfer = step.receiving.pop(key)
            progress.wait_for((transfer,))
            inputs = (buffer.requires_grad_(),)
            return inputs, inputs, None

        return take

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradient of the input for the stage that it came from."""
        key = self._base + microbatch

        def give(step: Step, gradients: Sequence[torch.Tensor | None], inputs: Tensors) -> None:
            (gradient,), (tensor,) = gradients, inputs
            step.outgoing_gradients[key] = to_layout_of(
                torch.zeros_like(tensor) if gradient is None else gradient, tensor
            )

        return give

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradient of the output."""
        key, progress = self._base + microbatch, self._channel.progress

        def take(step: Step) -> Tensors:
            buffer, transfer = step.receiving_gradients.pop(key)
            progress.wait_for((transfer,))
            return (buffer,)

        return take

    def send(self, microbatch: int) -> Operation:
        """SEND_F."""
        key, peer, send = self._base + microbatch, self._peer, self._channel.send
        tag = 2 * key

        def operation(step: Step) -> None:
            tensor, version = step.outgoing.pop(key)
            step.sends_in_flight[tag] = ((send(as_wire(tensor), peer, tag), tensor, version),)

        return operation

    def send_gradients(self, microbatch: int) -> Operation:
        """SEND_B."""
        key, peer, send = self._base + microbatch, self._peer, self._channel.send
        tag = 2 * key + 1

        def operation(step: Step) -> None:
            tensor = step.outgoing_gradients.pop(key)
            step.sends_in_flight[tag] = ((send(as_wire(tensor), peer, tag), tensor, tensor._version),)

        return operation

    def _receiving(self, microbatch: int, metas: Sequence[TensorSpec], where: str, kind: int) -> Operation:
        key, peer, receive, device = self._base + microbatch, self._peer, self._channel.receive, self._device
        tag = 2 * key + kind
        ((shape, stride, dtype),) = [(meta.shape, meta.stride, meta.dtype) for meta in metas]

        def operation(step: Step) -> None:
            buffer = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            getattr(step, where)[key] = buffer, receive(as_wire(buffer), peer, tag)

        return operation
