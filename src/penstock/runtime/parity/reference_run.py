"""Runs a step without a schedule: microbatch by microbatch through all stages and back, as the unsplit model would.

It shares with the runtime only stages and transfers between ranks. Only one stage works at a time, and all ranks go
through all stages in the same order: a value is sent when the stage that takes it is next. So ranks cannot deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from penstock.execution.autograd import needs_gradient
from penstock.execution.links import fill_missing, roots_of
from penstock.execution.links.fan_out import add_up, number_roots
from penstock.execution.preserved_state import copy_as_leaves
from penstock.execution.step import InFlight
from penstock.execution.value_spec import as_wire, flatten
from penstock.execution.wire_format import decode, encode
from penstock.runtime.ends import compute_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.execution.value_spec import ValueSpec
    from penstock.ir.edges import Link
    from penstock.runtime.transport.protocol import Transport
    from penstock.runtime.wiring import Wiring

    #: Called after each backward: the stage, what it was called with, and the gradients of its outputs and inputs.
    Look = Callable[["StageVisit", Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]], None]


class StageVisit(NamedTuple):
    """A microbatch in a stage.

    Attributes:
        stage: the stage.
        microbatch: the number of the microbatch.
        run: calls the stage once more, with copies of the same arguments.
        flight: where the graph begins and ends.
        outputs: what goes over each link that leaves the stage.
        inputs: what came over each link that enters it.
        numbers: for each gradient that comes back, which root it belongs to.
    """

    stage: Stage
    microbatch: int
    run: Callable[[], InFlight]
    flight: InFlight
    outputs: Mapping[Link, ValueSpec]
    inputs: Mapping[Link, ValueSpec]
    numbers: Sequence[int]


class ReferenceRun:
    """Runs a batch; gradients are added to ``.grad``.

    Attributes:
        losses: the loss of each microbatch so far, where the last stage is.
        outputs: what each of these is the loss of, as copies.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        transport: Transport,
        loss_fn: Callable[..., torch.Tensor] | None,
    ) -> None:
        self._stages = stages
        self._wiring = wiring
        self._last = len(wiring.rank_of) - 1
        self._transport = transport
        self._loss_fn = loss_fn
        self._values: dict[Link, tuple[ValueSpec, Sequence[torch.Tensor]]] = {}
        self._gradients: dict[Link, Sequence[torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    def run(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        targets: Sequence[Any],
        shares: Sequence[float],
        look: Look | None = None,
    ) -> None:
        """Run all microbatches. All ranks call it."""
        for microbatch, keywords in enumerate(kwargs):
            visits: dict[int, StageVisit] = {}
            for index in range(self._last + 1):
                for link in self._wiring.into(index):
                    self._move(link)
                if index in self._stages:
                    begin = args[microbatch] if index == 0 else ()
                    target = targets[microbatch] if index == self._last else None
                    visits[index] = self._forward(index, microbatch, begin, keywords, target)
            for index in reversed(range(self._last + 1)):
                for link in self._wiring.outputs(index).links:
                    self._move_gradients(link, visits.get(index))
                if index in self._stages:
                    self._backward(visits[index], shares, look)

    def _forward(
        self, index: int, microbatch: int, begin: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> StageVisit:
        stage, outputs = self._stages[index], self._wiring.outputs(index)
        taken = {link: self._values.pop(link) for link in self._wiring.into(index)}
        for link, (meta, tensors) in taken.items():
            begin += self._wiring.route(link).as_arguments(meta.unflatten(_leaves(meta, tensors)))
        again = copy_as_leaves(begin), copy_as_leaves(kwargs)

        def call(args: Any, keywords: Any) -> tuple[Any, InFlight]:
            # What the first stage is called with has no stage before it.
            inputs = [one for one in pytree.tree_leaves(args) if needs_gradient(one)] if taken else []
            output = stage.module(*(stage.fresh(args) if stage.changes_inputs else args), **keywords)
            if index < self._last:
                payloads = outputs.payloads(outputs.values(output)) if outputs.links else []
                flat = [flatten(payload) for payload in payloads]
                return flat, InFlight([root for leaves, _ in flat for root in roots_of(leaves)], inputs)
            if len(self.outputs) == microbatch:  # and not a repeated run
                self.outputs.append(copy_as_leaves(output))
            assert self._loss_fn is not None
            loss = compute_loss(self._loss_fn, output, target)
            return loss, InFlight(stage.loss_root(loss, output), inputs)

        def unique(flight: InFlight) -> InFlight:
            return InFlight(number_roots(flight.roots)[0], flight.inputs)

        found, flight = call(begin, copy_as_leaves(kwargs))
        if index == self._last:
            self.losses.append(found.detach())
            found = []
        sent = {link: described for link, (_, described) in zip(outputs.links, found, strict=True)}
        for link, (leaves, described) in zip(outputs.links, found, strict=True):
            tensors = [one.to_layout(leaf.detach()) for one, leaf in zip(described.tensors, leaves, strict=True)]
            self._values[link] = described, tensors
        numbers = number_roots(flight.roots)[1]
        came = {link: meta for link, (meta, _) in taken.items()}
        return StageVisit(stage, microbatch, lambda: unique(call(*again)[1]), unique(flight), sent, came, numbers)

    def _backward(self, visit: StageVisit, shares: Sequence[float], look: Look | None) -> None:
        if visit.stage.index == self._last:
            seed = torch.full_like(self.losses[-1], shares[visit.microbatch])
            gradients: Sequence[torch.Tensor | None] = [seed] if visit.flight.roots else []
        else:
            returning = [link for link in visit.outputs if link.gradient]
            arrived = [gradient for link in returning for gradient in self._gradients.pop(link)]
            gradients = add_up(arrived, visit.numbers)
        found = visit.stage.backward(visit.flight, gradients)
        if look is not None:  # before the previous stage runs: it may add to the same parameters
            look(visit, gradients, found)
        whole = iter(fill_missing(found, visit.flight.inputs))
        for link, meta in visit.inputs.items():
            if link.gradient:
                metas = [one for one in meta.tensors if one.requires_grad]
                self._gradients[link] = [one.to_layout(next(whole)) for one in metas]

    def _move(self, link: Link) -> None:
        """Bring what goes over a link to the rank of its target."""
        source, target = (self._wiring.rank_of[stage] for stage in link[:2])
        if source == target or self._transport.rank not in (source, target):
            return
        if self._transport.rank == source:
            meta, tensors = self._values.pop(link)
            self._transport.send_bytes(target, encode(meta))
            self._send(target, tensors)
        else:
            meta = decode(self._transport.receive_bytes(source))
            buffers = [one.empty(self._stages[link.target].device) for one in meta.tensors]
            self._values[link] = meta, self._receive(source, buffers)

    def _move_gradients(self, link: Link, visit: StageVisit | None) -> None:
        """Bring the gradients of what went over a link to the rank of its source."""
        source, target = (self._wiring.rank_of[stage] for stage in link[:2])
        if not link.gradient or source == target:
            return
        if self._transport.rank == target:
            self._send(source, self._gradients.pop(link))
        elif visit is not None:
            tensors = [one for one in visit.outputs[link].tensors if one.requires_grad]
            self._gradients[link] = self._receive(target, [one.empty(visit.stage.device) for one in tensors])

    def _send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._transport.send(as_wire(tensor), peer, 0).wait()

    def _receive(self, peer: int, empty: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for tensor in empty:
            self._transport.receive(as_wire(tensor), peer, 0).wait()
        return empty


def _leaves(meta: ValueSpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        tensor.detach().requires_grad_(one.requires_grad) for tensor, one in zip(tensors, meta.tensors, strict=True)
    ]
