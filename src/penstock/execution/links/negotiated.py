"""A link between ranks over which goes what they agreed on beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import MetadataError
from penstock.execution.links import (
    Give,
    GiveGradients,
    Route,
    Take,
    TakeGradients,
    Taken,
    guard,
    keep,
    roots_of,
)
from penstock.execution.links.remote_base import RemoteLink
from penstock.execution.value_spec import TensorSpec, ValueSpec, as_wire, describe, mismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.channel import Channel
    from penstock.execution.step import Operation, Step


class NegotiatedLink(RemoteLink):
    """A link between ranks, over which goes what was agreed beforehand."""

    def __init__(
        self,
        route: Route,
        channel: Channel,
        peer: int,
        device: torch.device,
        metas: Sequence[ValueSpec],
        *,
        modifiable: bool = True,
    ) -> None:
        super().__init__(route, len(metas), channel, peer, device)
        self._metas = metas
        self._modifiable = modifiable

    def give(self, microbatch: int) -> Give:
        """Keep an output for the target."""
        key, meta = self._base + microbatch, self._metas[microbatch]

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            leaves = self._check(step, meta, output)
            step.outgoing[key] = [keep(one.to_layout(leaf)) for one, leaf in zip(meta.tensors, leaves, strict=True)]
            return roots_of(leaves)

        return give

    def _check(self, step: Step, meta: ValueSpec, output: Any) -> Sequence[torch.Tensor]:
        """Get the tensors of an output, which must be what was agreed."""
        leaves = meta.match(output, kin=step.kin if self._modifiable else None)
        if leaves is not None:
            return leaves
        error = mismatch(meta, describe(output, step.kin), sender=self._sender, receiver=self._receiver)
        raise error or MetadataError(f"{self._sender} returned a value that cannot be sent: {output!r}")

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        key, meta = self._base + microbatch, self._metas[microbatch]
        needs, progress = [one.requires_grad for one in meta.tensors], self._channel.progress
        modifiable, route = self._modifiable, self.route

        def take(step: Step) -> Taken:
            buffers, pending = step.receiving.pop(key)
            progress.wait_for(pending)
            inputs = [buffer.requires_grad_() for buffer, needed in zip(buffers, needs, strict=True) if needed]
            watched = guard(meta, buffers, route, modifiable=modifiable)
            return route.as_arguments(meta.unflatten(buffers)), inputs, watched

        return take

    def send(self, microbatch: int) -> Operation:
        """SEND_F."""
        key, peer, send = self._base + microbatch, self._peer, self._channel.send
        tag = 2 * key

        def operation(step: Step) -> None:
            kept = step.outgoing.pop(key)
            step.sends_in_flight[tag] = [
                (send(as_wire(tensor), peer, tag), tensor, version) for tensor, version in kept
            ]

        return operation

    def receive(self, microbatch: int) -> Operation:
        """RECV_F."""
        return self._receiving(microbatch, self._metas[microbatch].tensors, "receiving", 0)

    def send_gradients(self, microbatch: int) -> Operation | None:
        """SEND_B."""
        return self._send_gradients(microbatch) if self._gradient_specs(microbatch) else None

    def receive_gradients(self, microbatch: int) -> Operation | None:
        """RECV_B."""
        returning = self._gradient_specs(microbatch)
        return self._receiving(microbatch, returning, "receiving_gradients", 1) if returning else None

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradients of the outputs."""
        return super().take_gradients(microbatch) if self._gradient_specs(microbatch) else lambda _: ()

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stage that they came from."""
        return super().give_gradients(microbatch) if self._gradient_specs(microbatch) else lambda *_: None

    def _gradient_specs(self, microbatch: int) -> list[TensorSpec]:
        return [meta for meta in self._metas[microbatch].tensors if meta.requires_grad]

    def _receiving(self, microbatch: int, metas: Sequence[TensorSpec], where: str, kind: int) -> Operation:
        key, peer, receive, device = self._base + microbatch, self._peer, self._channel.receive, self._device
        tag = 2 * key + kind
        layouts = [(meta.shape, meta.stride, meta.dtype) for meta in metas]

        def operation(step: Step) -> None:
            buffers = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in layouts
            ]
            getattr(step, where)[key] = buffers, [receive(as_wire(buffer), peer, tag) for buffer in buffers]

        return operation
