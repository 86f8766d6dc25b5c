"""Sends the values of stages, and tokens, to other ranks while tokens are generated.

What goes over a link has one shape for the prompts of a microbatch and another one for all tokens after the first. Both
are described when they first go, with the value itself.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import GenerationError, MetadataError
from penstock.execution.links.headered import receive_announced
from penstock.execution.value_spec import as_wire, flatten
from penstock.execution.wire_format import HEADER_BYTES, header_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.execution.channel import Pending
    from penstock.execution.value_spec import ValueSpec
    from penstock.runtime.generation.routes import Way
    from penstock.runtime.transport.protocol import Transport


class Transfers:
    """Sends and receives values on one rank.

    Args:
        transport: what connects the ranks.
        microbatches: how many microbatches there are.
        device: where values are received.
    """

    def __init__(self, transport: Transport, microbatches: int, device: torch.device) -> None:
        self._transport = transport
        self._microbatches = microbatches
        self._device = device
        self._described: dict[tuple[Way, bool], ValueSpec] = {}
        self._in_flight: dict[Way, list[tuple[Pending, torch.Tensor]]] = {}
        self._coming: dict[Way, _Coming] = {}

    def send(self, way: Way, value: Any, token: int) -> None:
        """Post the send of a value, which must not change later."""
        self._settle(way)
        leaves, found = flatten(value)
        key = way, token == 0
        agreed = self._described.setdefault(key, found)
        tensors = [one.to_layout(leaf) for one, leaf in zip(agreed.tensors, leaves, strict=False)]
        if agreed is found:
            header = [part.to(self._device) for part in header_tensor(found) if part is not None]
            tensors = [*header, *tensors]
        elif not _fits(agreed, found):
            raise GenerationError(
                f"{way.label} gets {_describe(found)} for new token {token}, but {_describe(agreed)} for those before; "
                "a model whose stages exchange values that grow with the number of tokens cannot generate in a pipeline"
            )
        self._in_flight[way] = [(self._post(tensor, way), tensor) for tensor in tensors]

    def receive(self, way: Way, token: int) -> None:
        """Post the receive of the next value."""
        key = way, token == 0
        coming = self._coming[way] = _Coming(key)
        if (agreed := self._described.get(key)) is not None:
            coming.spec, coming.buffers = agreed, [one.empty(self._device) for one in agreed.tensors]
            receive = self._transport.receive
            coming.pending = [receive(as_wire(one), way.peer, self._tag(way)) for one in coming.buffers]
            return
        coming.header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
        coming.pending = [self._transport.receive(coming.header, way.peer, self._tag(way))]
        if self._transport.model.lanes != "message":  # its values come next, in the order in which they are sent
            with self._awaiting(way):
                self._read_header(way, coming)

    def take(self, way: Way) -> Any:
        """Wait for a value that is being received."""
        coming = self._coming.pop(way)
        with self._awaiting(way):
            if coming.spec is None:
                self._read_header(way, coming)
            self._transport.progress.wait_for(coming.pending)
        assert coming.spec is not None
        return coming.spec.unflatten(coming.buffers)

    def finish(self) -> None:
        """Wait until all has been sent."""
        for way in list(self._in_flight):
            self._settle(way)

    def _read_header(self, way: Way, coming: _Coming) -> None:
        assert coming.header is not None
        try:
            coming.spec, coming.buffers, coming.pending = receive_announced(
                self._transport, coming.header, coming.pending[0], way.peer, self._tag(way)
            )
        except MetadataError as error:
            raise MetadataError(f"could not decode what rank {way.peer} sent for {way.label}: {error}") from error
        self._described[coming.key] = coming.spec

    @contextmanager
    def _awaiting(self, way: Way) -> Iterator[None]:
        """Show what this rank waits for; also afterwards, if the wait fails."""
        self._transport.progress.awaited = way.peer, way.label
        yield
        self._transport.progress.awaited = None

    def _settle(self, way: Way) -> None:
        """Wait for the send before, which has arrived if anything was computed from it."""
        sent = self._in_flight.pop(way, ())
        if sent:
            with self._awaiting(way):
                self._transport.progress.wait_for(pending for pending, _ in sent)

    def _post(self, tensor: torch.Tensor, way: Way) -> Pending:
        return self._transport.send(as_wire(tensor), way.peer, self._tag(way))

    def _tag(self, way: Way) -> int:
        return way.number * self._microbatches + way.microbatch


class _Coming:
    """A value that is being received."""

    def __init__(self, key: tuple[Way, bool]) -> None:
        self.key = key
        self.spec: ValueSpec | None = None
        self.header: torch.Tensor | None = None
        self.buffers: Sequence[torch.Tensor] = ()
        self.pending: Sequence[Pending] = ()


def _fits(agreed: ValueSpec, found: ValueSpec) -> bool:
    shapes = [[(one.shape, one.dtype) for one in spec.tensors] for spec in (agreed, found)]
    return agreed.structure == found.structure and shapes[0] == shapes[1]


def _describe(spec: ValueSpec) -> str:
    return ", ".join(map(str, spec.tensors)) or "no tensor"
