"""Runs actions of stages that exchange values with any other stages, by their methods.

Each link between two stages has its own transfers. What goes to a stage of the same rank is handed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from penstock.execution.messages import number_links, received_by, sent_by
from penstock.ir.actions import BACKWARD_INPUT, FORWARD, FULL_BACKWARD, RECV_B, RECV_F, SEND_B, SEND_F
from penstock.ir.edges import links as links_of
from penstock.pipelining._engine.methods import MethodOperations
from penstock.pipelining._stage.links import LinkedStage
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.ir.edges import Edge
    from penstock.pipelining._engine.step import MethodStep, Operation, Works
    from penstock.pipelining._schedule.actions import _Action


def edges_of(stages: Iterable[Any]) -> tuple[Edge, ...] | None:
    """Find the edges of a pipeline whose stages say what they exchange; None for a chain of other stages."""
    every = list(stages)
    if not every or not all(isinstance(stage, LinkedStage) for stage in every):
        return None
    edges: tuple[Edge, ...] = every[0].edges
    return edges


class LinkOperations(MethodOperations):
    """Runs actions by the methods of stages, with a transfer per link."""

    def __init__(self, *args: Any, edges: Sequence[Edge], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._links = links_of(edges)
        self._numbers = number_links(self._links)

    def _action(self, action: _Action) -> Operation | None:
        if action.computation_type in (SEND_F, SEND_B):
            return self._send(action)
        if action.computation_type in (RECV_F, RECV_B):
            return self._receive(action)
        return super()._action(action)

    def _send(self, action: _Action) -> Operation:
        message, stage = sent_by(action), self.stage(action)
        assert message is not None
        key, peer = message.key(self._microbatches, self._numbers), message.target
        outgoing = stage.outputs_for if action.computation_type is SEND_F else stage.gradients_for

        def begin(step: MethodStep) -> Works:
            tensors = outgoing(message.microbatch, peer)
            if self._directly:
                works: Works = stage._send(tensors)
                return works
            return step.post([stage._operation(dist.isend, tensor, peer) for tensor, _ in tensors]) if tensors else []

        def send(step: MethodStep) -> None:
            step.sends[key] = begin(step)

        return send

    def _receive(self, action: _Action) -> Operation:
        message, stage = received_by(action), self.stage(action)
        assert message is not None
        key, is_forward = (stage.stage_index, message.microbatch), action.computation_type is RECV_F
        incoming = stage.inputs_from if is_forward else stage.gradients_from
        begin = stage._receive if self._directly else stage._get_recv_ops

        def receive(step: MethodStep) -> None:
            begun = begin(incoming(message.microbatch, message.source))
            works = begun if self._directly or not begun else step.post(begun)
            posted = step.forward_receives if is_forward else step.backward_receives
            posted.setdefault(key, []).extend(works)

        return receive

    def _compute(self, stage: Any, action: _Action, microbatch: int) -> Operation:
        kind, index = action.computation_type, action.stage_index
        sources = [link.source for link in self._links if link.target == index]
        if kind is FORWARD:
            targets = [self.stages[link.target] for link in self._links if link.source == index and self._is_here(link)]
            receives = any(source not in self.stages for source in sources)
            return self.forward(stage, microbatch, _Targets(index, targets) if targets else None, receives=receives)
        receives = any(link.source == index and link.gradient and not self._is_here(link) for link in self._links)
        before = [self.stages[source] for source in sources if source in self.stages] or None
        if kind is FULL_BACKWARD:
            return self.backward(stage, microbatch, before, receives=receives)
        if kind is BACKWARD_INPUT:
            return self._backward_input(stage, microbatch, before, receives=receives)
        return super()._compute(stage, action, microbatch)

    def _is_here(self, link: Any) -> bool:
        return link.target in self.stages

    def _hand_over(self, stage: Any, before: Any, microbatch: int) -> Callable[[], None]:
        """Give the gradients of inputs to the stages of this rank that they come from."""
        is_all = {origin.stage for origin in stage.origins} <= {each.stage_index for each in before}

        def hand_over() -> None:
            if microbatch not in stage.bwd_cache:  # in an evaluation
                return
            gradients = stage.bwd_cache[microbatch]
            for each in before:
                each.take_gradients(stage, gradients, microbatch)
            if is_all:
                del stage.bwd_cache[microbatch]

        return hand_over


class _Targets:
    """The stages of a rank that use the outputs of another one of it."""

    def __init__(self, source: int, stages: Sequence[Any]) -> None:
        self._source = source
        self._stages = stages

    def set_local_fwd_input(self, output: Any, microbatch: int) -> None:
        """Hand the outputs over."""
        outputs = _normalize_model_output_as_tuple(output)
        for stage in self._stages:
            stage.take_outputs(self._source, outputs, microbatch)
