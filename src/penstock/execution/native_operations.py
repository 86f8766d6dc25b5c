"""Builds the native operations of a rank: a function per action, bound once to its stages and their links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.execution.links import ABSENT, check_unchanged
from penstock.execution.messages import received_by, sent_by
from penstock.execution.operation_set import run_in_sequence
from penstock.execution.step import InFlight
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.execution.channel import Progress
    from penstock.execution.links import GiveGradients, Inbound, LinkEnds, Outbound, TakeGradients
    from penstock.execution.messages import Message
    from penstock.execution.stage import Stage
    from penstock.execution.step import Operation, Step
    from penstock.ir.actions import Action, ComputationType


class NativeOperations:
    """Builds the operations of one rank: each stage works between two ends, and links run between the ends.

    Attributes:
        stages: the stages of this rank.
        inbound: for each of them, where its inputs come from, and their gradients go.
        outbound: for each of them, where its outputs go, and their gradients come from.
        links: the links to and from these stages, by source and target.
        microbatches: how many microbatches there are.
        progress: shows when an operation waits.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        inbound: Mapping[int, Inbound],
        outbound: Mapping[int, Outbound],
        links: Mapping[tuple[int, int], LinkEnds],
        *,
        microbatches: int,
        progress: Progress,
    ) -> None:
        self.stages = stages
        self.inbound = inbound
        self.outbound = outbound
        self.links = links
        self.microbatches = microbatches
        self.progress = progress

    def operation(self, action: Action) -> Operation | None:
        """Build the operation of an action; None if there is nothing to do."""
        if action.computation_type is OVERLAP_F_B:
            return run_in_sequence(map(self.operation, action.parts))
        return _MAKERS[action.computation_type](self, action)

    def label(self, action: Action) -> str:
        """Get the text of an action."""
        return str(action)

    def release_sends(self, keys: Sequence[int]) -> Operation:
        """Wait for sends, and release their tensors."""
        progress = self.progress

        def release(step: Step) -> None:
            for key in keys:
                for transfer, tensor, version in step.sends_in_flight.pop(key, ()):
                    progress.wait_for((transfer,))
                    check_unchanged(tensor, version)

        return release

    def find_unrun(self, action: Action, step: Step) -> Action | None:
        """Find a forward or backward of a training step that its action did not run; None if all ran."""
        for part in action.parts if torch.is_grad_enabled() else ():
            kind, in_flight = part.computation_type, self._slot(part) in step.in_flight
            if (kind is FORWARD and not in_flight) or (kind in (FULL_BACKWARD, BACKWARD_INPUT) and in_flight):
                return part
        return None

    def _slot(self, action: Action) -> int:
        return action.stage_index * self.microbatches + _microbatch(action)

    def _forward(self, action: Action) -> Operation:
        stage, microbatch = self.stages[action.stage_index], _microbatch(action)
        take = self.inbound[stage.index].take(microbatch)
        give = self.outbound[stage.index].give(microbatch)
        slot = self._slot(action)

        def forward(step: Step) -> None:
            taken = take(step)
            if taken is None:
                give(step, ABSENT)
                return
            args, inputs, watched = taken
            if stage.changes_inputs:
                args = stage.fresh(args)
            step.operands = action, args
            step.computing = True
            output = stage.module(*args, **step.kwargs[microbatch])
            step.computing = False
            if watched is None:
                roots = give(step, output)
            else:
                watched.check()
                step.kin = watched.tensors
                roots = give(step, output)
                step.kin = ()
            if not roots and step.training_check is not None:
                step.training_check.note(stage, has_inputs=bool(inputs))
            step.in_flight[slot] = InFlight(roots, inputs)
            step.operands = None

        return forward

    def _backward(self, action: Action) -> Operation:
        stage, slot = self.stages[action.stage_index], self._slot(action)
        take, give = self._gradient_ends(action)

        def backward(step: Step) -> None:
            gradients = take(step)
            flight = step.in_flight.pop(slot)
            step.operands = action, gradients
            step.computing = True
            found = stage.backward(flight, gradients)
            step.computing = False
            give(step, found, flight.inputs)
            step.operands = None

        return backward

    def _input_backward(self, action: Action) -> Operation:
        stage, slot = self.stages[action.stage_index], self._slot(action)
        take, give = self._gradient_ends(action)

        def input_backward(step: Step) -> None:
            gradients = take(step)
            flight = step.in_flight.pop(slot)
            step.operands = action, gradients
            step.computing = True
            found, step.deferred[slot] = stage.input_backward(flight, gradients)
            step.computing = False
            give(step, found, flight.inputs)
            step.operands = None

        return input_backward

    def _gradient_ends(self, action: Action) -> tuple[TakeGradients, GiveGradients]:
        stage, microbatch = action.stage_index, _microbatch(action)
        return self.outbound[stage].take_gradients(microbatch), self.inbound[stage].give_gradients(microbatch)

    def _weight_backward(self, action: Action) -> Operation:
        slot = self._slot(action)
        return lambda step: step.deferred.pop(slot)()

    def _send(self, action: Action) -> Operation | None:
        link = self._link_of(sent_by(action))
        return None if link is None else link.send(_microbatch(action))

    def _receive(self, action: Action) -> Operation | None:
        link = self._link_of(received_by(action))
        return None if link is None else link.receive(_microbatch(action))

    def _send_gradients(self, action: Action) -> Operation | None:
        link = self._link_of(sent_by(action))
        return None if link is None else link.send_gradients(_microbatch(action))

    def _receive_gradients(self, action: Action) -> Operation | None:
        link = self._link_of(received_by(action))
        return None if link is None else link.receive_gradients(_microbatch(action))

    def _link_of(self, message: Message | None) -> LinkEnds | None:
        """Find the link of a message; None if there is none, as before the first stage."""
        return None if message is None else self.links.get(message.link)

    def _unshard(self, action: Action) -> Operation | None:
        parallel = self.stages[action.stage_index].parallel
        return None if parallel is None else lambda _: parallel.unshard()

    def _reshard(self, action: Action) -> Operation | None:
        parallel = self.stages[action.stage_index].parallel
        return None if parallel is None else lambda _: parallel.reshard()

    def _reduce(self, action: Action) -> Operation | None:
        parallel = self.stages[action.stage_index].parallel
        return None if parallel is None else lambda _: parallel.reduce()


def _microbatch(action: Action) -> int:
    return action.microbatch_index or 0


_MAKERS: Mapping[ComputationType, Callable[[NativeOperations, Action], Operation | None]] = {
    FORWARD: NativeOperations._forward,
    FULL_BACKWARD: NativeOperations._backward,
    BACKWARD_INPUT: NativeOperations._input_backward,
    BACKWARD_WEIGHT: NativeOperations._weight_backward,
    SEND_F: NativeOperations._send,
    RECV_F: NativeOperations._receive,
    SEND_B: NativeOperations._send_gradients,
    RECV_B: NativeOperations._receive_gradients,
    UNSHARD: NativeOperations._unshard,
    RESHARD: NativeOperations._reshard,
    REDUCE_GRAD: NativeOperations._reduce,
}
