"""Runs a step without a schedule: microbatch by microbatch through all stages and back, as the unsplit model would.

It shares with the runtime only stages and transfers between ranks. Only one stage works
at a time, so ranks cannot deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from penstock.execution.links import as_arguments, fill_missing, roots_of
from penstock.execution.preserved_state import copy_as_leaves
from penstock.execution.step import InFlight
from penstock.execution.value_spec import as_wire, flatten
from penstock.execution.wire_format import decode, encode
from penstock.runtime.ends import compute_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.execution.value_spec import ValueSpec
    from penstock.runtime.transport.protocol import Transport

    #: Called after each backward: the stage, what it was called with, and the gradients of its outputs and inputs.
    Look = Callable[["StageVisit", Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]


class StageVisit(NamedTuple):
    """A microbatch in a stage.

    Attributes:
        stage: the stage.
        microbatch: the number of the microbatch.
        run: calls the stage once more, with copies of the same arguments.
        flight: where the graph begins and ends.
        output: what the output looks like; None for the last stage, which has a loss.
        input: what came from the stage before; None for the first stage.
    """

    stage: Stage
    microbatch: int
    run: Callable[[], InFlight]
    flight: InFlight
    output: ValueSpec | None
    input: ValueSpec | None


class ReferenceRun:
    """Runs a batch; gradients are added to ``.grad``.

    Attributes:
        losses: the loss of each microbatch so far, where the last stage is.
        outputs: what each of these is the loss of, as copies.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        rank_of: Sequence[int],
        transport: Transport,
        loss_fn: Callable[..., torch.Tensor] | None,
    ) -> None:
        self._stages = stages
        self._rank_of = rank_of
        self._transport = transport
        self._loss_fn = loss_fn
        self._local: dict[tuple[int, bool], Any] = {}
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
            visits = []
            for index in sorted(self._stages):
                begin = args[microbatch] if index == 0 else None
                target = targets[microbatch] if index == len(self._rank_of) - 1 else None
                visits.append(self._forward(index, microbatch, begin, keywords, target))
            for visit in reversed(visits):
                share = shares[microbatch] if visit.output is None else 1.0
                gradients = self._gradients(visit, share)
                found = visit.stage.backward(visit.flight, gradients)
                if look is not None:  # before the previous stage runs: it may add to the same parameters
                    look(visit, gradients, found)
                if visit.input is not None:
                    whole = fill_missing(found, visit.flight.inputs)
                    metas = [one for one in visit.input.tensors if one.requires_grad]
                    self._give(
                        visit.stage.index,
                        visit.stage.index - 1,
                        [meta.to_layout(one) for meta, one in zip(metas, whole, strict=True)],
                    )

    def _forward(self, index: int, microbatch: int, begin: Any, kwargs: dict[str, Any], target: Any) -> StageVisit:
        stage, meta = self._stages[index], None
        if begin is None:
            meta, tensors = self._taken(index)
            begin = as_arguments(meta.unflatten(tensors))
        again = copy_as_leaves(begin), copy_as_leaves(kwargs)
        last = index == len(self._rank_of) - 1
        ends = meta is not None  # what the first stage is called with has no stage before it

        def call(args: Any, keywords: Any) -> tuple[Any, InFlight]:
            inputs = [one for one in pytree.tree_leaves(args) if _needs_gradient(one)] if ends else []
            output = stage.module(*(stage.fresh(args) if stage.changes_inputs else args), **keywords)
            if not last:
                return output, InFlight(roots_of(flatten(output)[0]), inputs)
            if len(self.outputs) == microbatch:  # and not a repeated run
                self.outputs.append(copy_as_leaves(output))
            assert self._loss_fn is not None
            loss = compute_loss(self._loss_fn, output, target)
            return loss, InFlight(stage.loss_root(loss, output), inputs)

        output, flight = call(begin, copy_as_leaves(kwargs))
        if last:
            self.losses.append(output.detach())
            return StageVisit(stage, microbatch, lambda: call(*again)[1], flight, None, meta)
        leaves, described = flatten(output)
        self._announce(index, described)
        tensors = [one.to_layout(leaf.detach()) for one, leaf in zip(described.tensors, leaves, strict=True)]
        self._give(index, index + 1, tensors)
        return StageVisit(stage, microbatch, lambda: call(*again)[1], flight, described, meta)

    def _gradients(self, visit: StageVisit, share: float) -> Sequence[torch.Tensor]:
        if visit.output is None:
            return [torch.full_like(self.losses[-1], share)] if visit.flight.roots else []
        empty = [one.empty(visit.stage.device) for one in visit.output.tensors if one.requires_grad]
        return self._take(visit.stage.index + 1, visit.stage.index, empty)

    def _announce(self, index: int, meta: ValueSpec) -> None:
        peer = self._rank_of[index + 1]
        if peer == self._transport.rank:
            self._local[index, True] = meta
        else:
            self._transport.send_bytes(peer, encode(meta))

    def _taken(self, index: int) -> tuple[ValueSpec, list[torch.Tensor]]:
        """Receive what the previous stage sends, as leaves."""
        peer = self._rank_of[index - 1]
        mine = peer == self._transport.rank
        meta = self._local.pop((index - 1, True)) if mine else decode(self._transport.receive_bytes(peer))
        tensors = self._take(index - 1, index, [one.empty(self._stages[index].device) for one in meta.tensors])
        leaves = [
            tensor.detach().requires_grad_(one.requires_grad) for tensor, one in zip(tensors, meta.tensors, strict=True)
        ]
        return meta, leaves

    def _give(self, source: int, target: int, tensors: Sequence[torch.Tensor]) -> None:
        peer = self._rank_of[target]
        if peer == self._transport.rank:
            self._local[source, False] = tensors
            return
        for tensor in tensors:
            self._transport.send(as_wire(tensor), peer, 2 * source + (target < source)).wait()

    def _take(self, source: int, target: int, empty: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        peer = self._rank_of[source]
        if peer == self._transport.rank:
            taken: Sequence[torch.Tensor] = self._local.pop((source, False))
            return taken
        for tensor in empty:
            self._transport.receive(as_wire(tensor), peer, 2 * source + (target < source)).wait()
        return empty


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
