"""How values get from one stage to the next, and gradients back.

An edge makes, for each microbatch, the functions that the operations of a rank are built from: *give* and *take* at the
ends of the stages, *send* and *receive* for transfers between ranks. What can be known beforehand is worked out when
they are made; they run once per microbatch and step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch.autograd.graph import GradientEdge

from penstock.errors import MetadataError, StageError
from penstock.execution.autograd import gradient_edge
from penstock.execution.shared_memory import SharedInputs, WatchedInputs, watch_shared
from penstock.execution.step import Operation, Step
from penstock.execution.trees import structure_of
from penstock.execution.value_spec import (
    TensorSpec,
    ValueSpec,
    as_wire,
    describe,
    flatten,
    mismatch,
)
from penstock.execution.wire_format import HEADER_BYTES, header_tensor, read_header

if TYPE_CHECKING:
    from penstock.execution.transport import Link

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
            f"a stage has changed a tensor in place after it returned it, while it was on its way "
            f"({TensorSpec.of(tensor)}); return a clone of it"
        )


def guard(meta: ValueSpec, inputs: Tensors, *, modifiable: bool) -> SharedInputs | WatchedInputs | None:
    """What to check after a stage has run with these inputs; None if it may modify all of them."""
    if modifiable:
        return watch_shared(meta.structure, inputs, meta.shared) if meta.shared else None
    return WatchedInputs(meta.structure, inputs) if len(inputs) > 1 else None


def roots_of(tensors: Tensors) -> list[GradientEdge]:
    """Where the graphs of tensors that need a gradient begin."""
    return [gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


class LocalEdge:
    """An edge between two stages of one rank.

    Args:
        stage: the stage that it comes from.
        microbatches: how many microbatches there are.
        modifiable: whether a later stage may modify its inputs in place.
    """

    def __init__(self, stage: int, microbatches: int, *, modifiable: bool = True) -> None:
        self._base = stage * microbatches
        self._modifiable = modifiable

    def give(self, microbatch: int) -> Give:
        """Keep an output for the next stage."""
        key = self._base + microbatch

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            if isinstance(output, torch.Tensor):
                step.local_values[key] = keep(output)
                return (gradient_edge(output),) if output.requires_grad else ()
            if output is ABSENT:
                step.local_values[key] = ABSENT, None
                return ()
            leaves, meta = flatten(output, step.kin)
            step.local_values[key] = [keep(leaf) for leaf in leaves], meta
            return roots_of(leaves)

        return give

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        key, modifiable = self._base + microbatch, self._modifiable

        def take(step: Step) -> Taken:
            output, about = step.local_values.pop(key)
            if isinstance(output, torch.Tensor):
                check_unchanged(output, about)
                cut = output.detach()
                if output.requires_grad:
                    return (cut,), (cut.requires_grad_(),), None
                return (cut,), (), None
            if output is ABSENT:
                return None
            for leaf, version in output:
                check_unchanged(leaf, version)
            cuts = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf, _ in output]
            watched = guard(about, cuts, modifiable=modifiable)
            return as_arguments(about.unflatten(cuts)), [cut for cut in cuts if cut.requires_grad], watched

        return take

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stage before."""
        key = self._base + microbatch

        def give(step: Step, gradients: Sequence[torch.Tensor | None], _inputs: Tensors) -> None:
            step.local_gradients[key] = gradients

        return give

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradients of the outputs."""
        key = self._base + microbatch
        return lambda step: step.local_gradients.pop(key)

    def send(self, microbatch: int) -> None:
        """SEND_F."""

    def receive(self, microbatch: int) -> None:
        """RECV_F."""

    def send_gradients(self, microbatch: int) -> None:
        """SEND_B."""

    def receive_gradients(self, microbatch: int) -> None:
        """RECV_B."""


def fill_missing(gradients: Sequence[torch.Tensor | None], inputs: Tensors) -> Tensors:
    """The gradients, with zeros for an input that nothing depends on."""
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    ]


class _Remote:
    """What the two kinds of edges between ranks have in common: gradients, whose shapes the activations tell."""

    def __init__(self, stage: int, microbatches: int, transport: Link, peer: int, device: torch.device) -> None:
        self._stage = stage
        self._base = stage * microbatches
        self._transport = transport
        self._peer = peer
        self._device = device

    @property
    def _sender(self) -> str:
        return f"stage {self._stage}"

    @property
    def _receiver(self) -> str:
        return f"stage {self._stage + 1}"

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stage before."""
        key = self._base + microbatch

        def give(step: Step, gradients: Sequence[torch.Tensor | None], inputs: Tensors) -> None:
            step.outgoing_gradients[key] = [
                to_layout_of(gradient, tensor)
                for gradient, tensor in zip(fill_missing(gradients, inputs), inputs, strict=True)
            ]

        return give

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradients of the outputs."""
        key, progress = self._base + microbatch, self._transport.progress

        def take(step: Step) -> Tensors:
            buffers: Tensors
            buffers, pending = step.receiving_gradients.pop(key)
            progress.waiting = True
            for transfer in pending:
                transfer.wait()
            progress.waiting = False
            return buffers

        return take

    def _send_gradients(self, microbatch: int) -> Operation:
        key, peer, send = self._base + microbatch, self._peer, self._transport.send
        tag = 2 * key + 1

        def operation(step: Step) -> None:
            tensors = step.outgoing_gradients.pop(key)
            step.sends_in_flight[tag] = [
                (send(as_wire(tensor), peer, tag), tensor, version_of(tensor)) for tensor in tensors
            ]

        return operation


def to_layout_of(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient in the layout of its tensor, which is what the other side expects."""
    if gradient.stride() == tensor.stride() and not (gradient.is_conj() or gradient.is_neg()):
        return gradient
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(gradient)


class NegotiatedEdge(_Remote):
    """An edge between ranks, over which goes what was agreed beforehand."""

    def __init__(
        self,
        stage: int,
        transport: Link,
        peer: int,
        device: torch.device,
        metas: Sequence[ValueSpec],
        *,
        modifiable: bool = True,
    ) -> None:
        super().__init__(stage, len(metas), transport, peer, device)
        self._metas = metas
        self._modifiable = modifiable

    def give(self, microbatch: int) -> Give:
        """Keep an output for the next stage."""
        key, meta, modifiable = self._base + microbatch, self._metas[microbatch], self._modifiable

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            leaves = meta.match(output, kin=step.kin if modifiable else None)
            if leaves is None:
                raise self._mismatch(step, meta, output)
            step.outgoing[key] = [keep(one.to_layout(leaf)) for one, leaf in zip(meta.tensors, leaves, strict=True)]
            return roots_of(leaves)

        return give

    def _mismatch(self, step: Step, meta: ValueSpec, output: Any) -> MetadataError:
        found = describe(output, step.kin)
        error = mismatch(meta, found, sender=self._sender, receiver=self._receiver)
        return error or MetadataError(f"{self._sender} gives a value that cannot be sent: {output!r}")

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        key, meta = self._base + microbatch, self._metas[microbatch]
        needs, progress = [one.requires_grad for one in meta.tensors], self._transport.progress
        modifiable = self._modifiable

        def take(step: Step) -> Taken:
            buffers, pending = step.receiving.pop(key)
            progress.waiting = True
            for transfer in pending:
                transfer.wait()
            progress.waiting = False
            inputs = [buffer.requires_grad_() for buffer, needed in zip(buffers, needs, strict=True) if needed]
            return as_arguments(meta.unflatten(buffers)), inputs, guard(meta, buffers, modifiable=modifiable)

        return take

    def send(self, microbatch: int) -> Operation:
        """SEND_F."""
        key, peer, send = self._base + microbatch, self._peer, self._transport.send
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
        """Keep the gradients of the inputs for the stage before."""
        return super().give_gradients(microbatch) if self._gradient_specs(microbatch) else lambda *_: None

    def _gradient_specs(self, microbatch: int) -> list[TensorSpec]:
        return [meta for meta in self._metas[microbatch].tensors if meta.requires_grad]

    def _receiving(self, microbatch: int, metas: Sequence[TensorSpec], where: str, kind: int) -> Operation:
        key, peer, receive, device = self._base + microbatch, self._peer, self._transport.receive, self._device
        tag = 2 * key + kind
        layouts = [(meta.shape, meta.stride, meta.dtype) for meta in metas]

        def operation(step: Step) -> None:
            buffers = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in layouts
            ]
            getattr(step, where)[key] = buffers, [receive(as_wire(buffer), peer, tag) for buffer in buffers]

        return operation


class HeaderedEdge(_Remote):
    """An edge between ranks, over which every value is described before it goes: shapes may vary."""

    def __init__(
        self, stage: int, microbatches: int, transport: Link, peer: int, device: torch.device, first_tag: int = 0
    ) -> None:
        super().__init__(stage, microbatches, transport, peer, device)
        self._first_tag = first_tag

    def give(self, microbatch: int) -> Give:
        """Keep an output for the next stage."""
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
        key, peer, send = self._base + microbatch, self._peer, self._transport.send
        place = 2 * key
        tag = self._first_tag + place

        def operation(step: Step) -> None:
            kept = step.outgoing.pop(key)
            step.sends_in_flight[place] = [
                (send(as_wire(tensor), peer, tag), tensor, version) for tensor, version in kept
            ]

        return operation

    def receive(self, microbatch: int) -> Operation:
        """The header; what it announces is received when it is there.

        A transport that knows messages by their tags can do that when the value is needed. With another one it has to
        be in the order of messages, so the header is waited for at once.
        """
        key, peer, receive, device = self._base + microbatch, self._peer, self._transport.receive, self._device
        tag = self._first_tag + 2 * key
        tagged = self._transport.model.lanes == "message"

        def announced(step: Step) -> None:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
            step.receiving[key] = header, receive(header, peer, tag)
            if not tagged:
                step.receiving[key] = self._announced(header, step.receiving[key][1], tag)

        return announced

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        key = self._base + microbatch
        tag = self._first_tag + 2 * key
        tagged, progress = self._transport.model.lanes == "message", self._transport.progress

        def take(step: Step) -> Taken:
            coming: Any = step.receiving.pop(key)
            progress.waiting = True
            meta, buffers, pending = self._announced(coming[0], coming[1], tag) if tagged else coming
            for transfer in pending:
                transfer.wait()
            progress.waiting = False
            value = self._with_samples(step, microbatch, meta.unflatten(buffers))
            if isinstance(value, str) and value == ABSENT:
                return None
            inputs = [
                buffer.requires_grad_()
                for buffer, one in zip(buffers, meta.tensors, strict=True)
                if one.requires_grad and torch.is_grad_enabled()
            ]
            watched = watch_shared(structure_of(value, []), buffers, meta.shared) if meta.shared else None
            return as_arguments(value), inputs, watched

        return take

    def _with_samples(self, step: Step, microbatch: int, told: Any) -> Any:
        """The value in what was sent: the number of samples, if it is known, goes before it."""
        if not isinstance(told, tuple) or len(told) != 2 or not isinstance(told[0], int | None):
            raise MetadataError(f"what {self._sender} sent to {self._receiver} does not begin with a number of samples")
        if told[0] is not None:
            step.samples[microbatch] = told[0]
        return told[1]

    def _announced(self, header: torch.Tensor, transfer: Any, tag: int) -> tuple[ValueSpec, Tensors, Sequence[Any]]:
        """Read a header, and receive what it announces."""
        transfer.wait()
        try:
            meta = read_header(header)
            if isinstance(meta, int):
                overflow = torch.empty(meta, dtype=torch.uint8, device=self._device)
                self._transport.receive(overflow, self._peer, tag).wait()
                meta = read_header(header, overflow)
        except MetadataError as error:
            told = f"what {self._sender} announced to {self._receiver} is damaged: {error}"
            raise MetadataError(told) from error
        meta = cast("ValueSpec", meta)
        # In inference mode changes of a new tensor would not be counted.
        with torch.inference_mode(False) if meta.shared else nullcontext():
            buffers = [one.empty(self._device) for one in meta.tensors]
        return meta, buffers, [self._transport.receive(as_wire(buffer), self._peer, tag) for buffer in buffers]

    def send_gradients(self, microbatch: int) -> Operation:
        """SEND_B."""
        return self._send_gradients(microbatch)

    def receive_gradients(self, microbatch: int) -> Operation:
        """RECV_B."""
        key = self._base + microbatch

        def operation(step: Step) -> None:
            if key in step.metas:  # else it is asked for ahead of the forward, and received when it is needed
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
        receive, peer, tag = self._transport.receive, self._peer, 2 * key + 1
        step.receiving_gradients[key] = buffers, [receive(as_wire(buffer), peer, tag) for buffer in buffers]
