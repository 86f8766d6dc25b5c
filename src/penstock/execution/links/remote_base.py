"""What links between ranks have in common: gradients, whose shapes follow from the activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.execution.links import (
    GiveGradients,
    TakeGradients,
    Tensors,
    fill_missing,
    to_layout_of,
    version_of,
)
from penstock.execution.messages import Message
from penstock.execution.value_spec import as_wire
from penstock.ir.dependencies import TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock.execution.channel import Channel
    from penstock.execution.links import Route
    from penstock.execution.step import Operation, Step


class RemoteLink:
    """Base class of links between ranks: gradients, whose shapes follow from the activations."""

    def __init__(self, route: Route, microbatches: int, channel: Channel, peer: int, device: torch.device) -> None:
        self.route = route
        self._base = route.number * microbatches
        self._channel = channel
        self._peer = peer
        self._device = device

    @property
    def _sender(self) -> str:
        return f"stage {self.route.source}"

    @property
    def _receiver(self) -> str:
        return f"stage {self.route.target}"

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stage that they came from."""
        key = self._base + microbatch

        def give(step: Step, gradients: Sequence[torch.Tensor | None], inputs: Tensors) -> None:
            step.outgoing_gradients[key] = [
                to_layout_of(gradient, tensor)
                for gradient, tensor in zip(fill_missing(gradients, inputs), inputs, strict=True)
            ]

        return give

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradients of the outputs."""
        key, progress = self._base + microbatch, self._channel.progress

        def take(step: Step) -> Tensors:
            buffers: Tensors
            buffers, pending = step.receiving_gradients.pop(key)
            progress.wait_for(pending)
            return buffers

        return take

    def awaits(self, microbatch: int, *, gradients: bool) -> tuple[int, str]:
        """The rank that its value, or its gradients, come from, and the text of their receive."""
        source, target = self.route[:2]
        sender, receiver = (target, source) if gradients else (source, target)
        return self._peer, Message(TRANSFERS[gradients], sender, receiver, microbatch).receive

    def _send_gradients(self, microbatch: int) -> Operation:
        key, peer, send = self._base + microbatch, self._peer, self._channel.send
        tag = 2 * key + 1

        def operation(step: Step) -> None:
            tensors = step.outgoing_gradients.pop(key)
            step.sends_in_flight[tag] = [
                (send(as_wire(tensor), peer, tag), tensor, version_of(tensor)) for tensor in tensors
            ]

        return operation
