"""A link between ranks over which every value is described before it goes: shapes may vary."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.errors import MetadataError
from penstock.execution.links import (
    ABSENT,
    Give,
    Route,
    Take,
    TakeGradients,
    Taken,
    Tensors,
    keep,
    roots_of,
)
from penstock.execution.links.remote_base import RemoteLink
from penstock.execution.shared_memory import watch_shared
from penstock.execution.trees import structure_of
from penstock.execution.value_spec import ValueSpec, as_wire, flatten
from penstock.execution.wire_format import HEADER_BYTES, header_tensor, read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.channel import Channel, Pending
    from penstock.execution.step import Operation, Step


class HeaderedLink(RemoteLink):
    """A link between ranks, over which every value is described before it goes: shapes may vary."""

    def __init__(
        self, route: Route, microbatches: int, channel: Channel, peer: int, device: torch.device, first_tag: int = 0
    ) -> None:
        super().__init__(route, microbatches, channel, peer, device)
        self._first_tag = first_tag

    def give(self, microbatch: int) -> Give:
        """Keep an output for the target."""
        key, device = self._base + microbatch, self._device

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            leaves, meta = flatten((step.samples.get(microbatch), output), step.kin)
            step.metas[key] = meta  # for the gradients, which may be asked for before this is sent
            header = [(part.to(device), None) for part in header_tensor(meta) if part is not None]
            tensors = [keep(one.to_layout(leaf)) for one, leaf in zip(meta.tensors, leaves, strict=True)]
            step.outgoing[key] = [*header, *tensors]
            return roots_of(leaves)

        return give

    def send(self, microbatch: int) -> Operation:
        """SEND_F."""
        key, peer, send = self._base + microbatch, self._peer, self._channel.send
        place = 2 * key
        tag = self._first_tag + place

        def operation(step: Step) -> None:
            kept = step.outgoing.pop(key)
            step.sends_in_flight[place] = [
                (send(as_wire(tensor), peer, tag), tensor, version) for tensor, version in kept
            ]

        return operation

    def receive(self, microbatch: int) -> Operation:
        """Receive the header, then what it announces.

        A transport that matches messages by tag can do the latter when the value is needed. Any other has to keep the
        order of messages, so it waits for the header at once.
        """
        key, peer, receive, device = self._base + microbatch, self._peer, self._channel.receive, self._device
        tag = self._first_tag + 2 * key
        tagged = self._channel.model.lanes == "message"

        def announced(step: Step) -> None:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
            step.receiving[key] = header, receive(header, peer, tag)
            if not tagged:
                step.receiving[key] = self._announced(header, step.receiving[key][1], tag)

        return announced

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        key, route = self._base + microbatch, self.route
        tag = self._first_tag + 2 * key
        tagged, progress = self._channel.model.lanes == "message", self._channel.progress

        def take(step: Step) -> Taken:
            coming: Any = step.receiving.pop(key)
            meta, buffers, pending = self._announced(coming[0], coming[1], tag) if tagged else coming
            progress.wait_for(pending)
            value = self._with_samples(step, microbatch, meta.unflatten(buffers))
            if isinstance(value, str) and value == ABSENT:
                return None
            inputs = [
                buffer.requires_grad_()
                for buffer, one in zip(buffers, meta.tensors, strict=True)
                if one.requires_grad and torch.is_grad_enabled()
            ]
            watched = (
                watch_shared(structure_of(value, []), buffers, meta.shared, route.input_name) if meta.shared else None
            )
            return route.as_arguments(value), inputs, watched

        return take

    def _with_samples(self, step: Step, microbatch: int, payload: Any) -> Any:
        """Take the value out of a message, which starts with the number of samples, if known."""
        if not isinstance(payload, tuple) or len(payload) != 2 or not isinstance(payload[0], int | None):
            raise MetadataError(
                f"the message from {self._sender} to {self._receiver} does not start with a number of samples"
            )
        if payload[0] is not None:
            step.samples[microbatch] = payload[0]
        return payload[1]

    def _announced(self, header: torch.Tensor, transfer: Any, tag: int) -> tuple[ValueSpec, Tensors, Sequence[Any]]:
        """Read a header, and receive what it announces."""
        try:
            return receive_announced(self._channel, header, transfer, self._peer, tag)
        except MetadataError as error:
            message = f"could not decode the header that {self._sender} sent to {self._receiver}: {error}"
            raise MetadataError(message) from error

    def send_gradients(self, microbatch: int) -> Operation:
        """SEND_B."""
        return self._send_gradients(microbatch)

    def receive_gradients(self, microbatch: int) -> Operation:
        """RECV_B."""
        key = self._base + microbatch

        def operation(step: Step) -> None:
            if key in step.metas:  # else it is posted ahead of the forward, and received when needed
                self._post_gradients(step, key)

        return operation

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradients of the outputs."""
        key = self._base + microbatch
        take = super().take_gradients(microbatch)

        def take_posted(step: Step) -> Sequence[torch.Tensor | None]:
            if key not in step.receiving_gradients:
                self._post_gradients(step, key)
            return take(step)

        return take_posted

    def _post_gradients(self, step: Step, key: int) -> None:
        buffers = [meta.empty(self._device) for meta in step.metas.pop(key).tensors if meta.requires_grad]
        receive, peer, tag = self._channel.receive, self._peer, 2 * key + 1
        step.receiving_gradients[key] = buffers, [receive(as_wire(buffer), peer, tag) for buffer in buffers]


def receive_announced(
    channel: Channel, header: torch.Tensor, transfer: Pending, peer: int, tag: int
) -> tuple[ValueSpec, Tensors, Sequence[Pending]]:
    """Read a header that is being received, and post receives of what it announces: its description, and buffers."""
    channel.progress.wait_for((transfer,))
    meta = read_header(header)
    if isinstance(meta, int):
        overflow = torch.empty(meta, dtype=torch.uint8, device=header.device)
        channel.progress.wait_for((channel.receive(overflow, peer, tag),))
        meta = cast("ValueSpec", read_header(header, overflow))
    # In inference mode a new tensor would have no version.
    with torch.inference_mode(False) if meta.shared else nullcontext():
        buffers = [one.empty(header.device) for one in meta.tensors]
    return meta, buffers, [channel.receive(as_wire(buffer), peer, tag) for buffer in buffers]
