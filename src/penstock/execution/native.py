"""What a rank does for each action: functions of the step, made once, with everything bound that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import StageError
from penstock.execution.edges import ABSENT, check_unchanged
from penstock.execution.operations import run_in_sequence
from penstock.execution.step import Flight
from penstock.execution.trees import map_tensors
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

    from penstock.execution.edges import Edge, Give, GiveGradients, Take, TakeGradients
    from penstock.execution.stage import Stage
    from penstock.execution.step import Operation, Step
    from penstock.execution.transport import Progress
    from penstock.ir.actions import Action, ComputationType

    LossFunction = Callable[[Any, Any], torch.Tensor]


class Workplace:
    """All that the operations of one rank work with.

    Attributes:
        stages: the stages of this rank.
        edges: the edges to and from them, by the stage that they come from.
        count: how many stages the pipeline has.
        microbatches: how many microbatches.
        loss_fn: the loss of an output and a target; None for a forward alone.
        progress: shows when an operation waits.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        edges: Mapping[int, Edge],
        *,
        count: int,
        microbatches: int,
        loss_fn: LossFunction | None,
        progress: Progress,
    ) -> None:
        self.stages = stages
        self.edges = edges
        self.progress = progress
        self.count = count
        self.microbatches = microbatches
        self.loss_fn = loss_fn

    def operation(self, action: Action) -> Operation | None:
        """What to do for an action; None if there is nothing to do."""
        if action.computation_type is OVERLAP_F_B:
            return run_in_sequence(map(self.operation, action.parts))
        return _MAKERS[action.computation_type](self, action)

    def label(self, action: Action) -> str:
        """The text of an action."""
        return str(action)

    def release_sends(self, keys: Sequence[int]) -> Operation:
        """Wait for sends, and let go of their tensors."""
        progress = self.progress

        def release(step: Step) -> None:
            for key in keys:
                for transfer, tensor, version in step.sending.pop(key, ()):
                    progress.waiting = True
                    transfer.wait()
                    progress.waiting = False
                    check_unchanged(tensor, version)

        return release

    def find_unrun(self, action: Action, step: Step) -> Action | None:
        """A forward or backward in a training step that has not run although its action has; None if all have."""
        for part in action.parts if torch.is_grad_enabled() else ():
            kind, in_flight = part.computation_type, self._slot(part) in step.flights
            if (kind is FORWARD and not in_flight) or (kind in (FULL_BACKWARD, BACKWARD_INPUT) and in_flight):
                return part
        return None

    def _slot(self, action: Action) -> int:
        return action.stage_index * self.microbatches + _microbatch(action)

    def _forward(self, action: Action) -> Operation:
        stage, microbatch = self.stages[action.stage_index], _microbatch(action)
        take = self._take(stage.index, microbatch)
        give = self._give(stage, microbatch)
        module, slot, changes_inputs = stage.module, self._slot(action), stage.changes_inputs

        def forward(step: Step) -> None:
            taken = take(step)
            if taken is None:
                give(step, ABSENT)
                return
            args, inputs, shared = taken
            if changes_inputs:
                args = stage.fresh(args)
            output = module(*args, **step.kwargs[microbatch])
            if shared is None:
                roots = give(step, output)
            else:
                shared.check()
                step.kin = shared.tensors
                roots = give(step, output)
                step.kin = ()
            if not roots and step.training_check is not None:
                step.training_check.note(stage, has_inputs=bool(inputs))
            step.flights[slot] = Flight(roots, inputs)

        return forward

    def _take(self, stage: int, microbatch: int) -> Take:
        if stage > 0:
            return self.edges[stage - 1].take(microbatch)

        def take(step: Step) -> Any:
            if microbatch >= len(step.args):
                return None
            return step.args[microbatch], (), step.shared_args[microbatch] if step.shared_args else None

        return take

    def _give(self, stage: Stage, microbatch: int) -> Give:
        if stage.index < self.count - 1:
            return self.edges[stage.index].give(microbatch)
        loss_fn = self.loss_fn

        def give(step: Step, output: Any) -> Any:
            if step.outputs is not None:
                step.outputs[microbatch] = output if output is ABSENT else without_history(output)
            if loss_fn is None or output is ABSENT:
                return ()
            if step.samples:
                step.check_samples(microbatch)
            loss = loss_of(loss_fn, output, step.targets[microbatch])
            roots = stage.loss_root(loss, output)
            if step.on_loss is not None:
                step.on_loss(microbatch, loss)
            step.losses[microbatch] = loss = loss.detach()
            if roots:
                # One for each microbatch: a node of the graph, or a hook, may modify it in place.
                step.seeds[microbatch] = (torch.full_like(loss, step.shares[microbatch]),)
            return roots

        return give

    def _backward(self, action: Action) -> Operation:
        stage, slot = self.stages[action.stage_index], self._slot(action)
        take, give = self._take_gradients(action), self._give_gradients(action)

        def backward(step: Step) -> None:
            gradients = take(step)
            flight = step.flights.pop(slot)
            give(step, stage.backward(flight, gradients), flight.inputs)

        return backward

    def _input_backward(self, action: Action) -> Operation:
        stage, slot = self.stages[action.stage_index], self._slot(action)
        take, give = self._take_gradients(action), self._give_gradients(action)

        def input_backward(step: Step) -> None:
            gradients = take(step)
            flight = step.flights.pop(slot)
            found, step.deferred[slot] = stage.input_backward(flight, gradients)
            give(step, found, flight.inputs)

        return input_backward

    def _weight_backward(self, action: Action) -> Operation:
        slot = self._slot(action)
        return lambda step: step.deferred.pop(slot)()

    def _take_gradients(self, action: Action) -> TakeGradients:
        stage, microbatch = action.stage_index, _microbatch(action)
        if stage < self.count - 1:
            return self.edges[stage].take_gradients(microbatch)
        return lambda step: step.seeds.pop(microbatch, ())

    def _give_gradients(self, action: Action) -> GiveGradients:
        if action.stage_index > 0:
            return self.edges[action.stage_index - 1].give_gradients(_microbatch(action))
        return lambda *_: None

    def _send(self, action: Action) -> Operation | None:
        return self.edges[action.stage_index].send(_microbatch(action))

    def _receive(self, action: Action) -> Operation | None:
        return self.edges[action.stage_index - 1].receive(_microbatch(action))

    def _send_gradients(self, action: Action) -> Operation | None:
        return self.edges[action.stage_index - 1].send_gradients(_microbatch(action))

    def _receive_gradients(self, action: Action) -> Operation | None:
        return self.edges[action.stage_index].receive_gradients(_microbatch(action))

    def _unshard(self, action: Action) -> Operation | None:
        parallel = self.stages[action.stage_index].parallel
        return None if parallel is None else lambda _: parallel.unshard()

    def _reshard(self, action: Action) -> Operation | None:
        parallel = self.stages[action.stage_index].parallel
        return None if parallel is None else lambda _: parallel.reshard()

    def _reduce(self, action: Action) -> Operation | None:
        parallel = self.stages[action.stage_index].parallel
        return None if parallel is None else lambda _: parallel.reduce()


def loss_of(loss_fn: LossFunction, output: Any, target: Any) -> torch.Tensor:
    """The loss of a microbatch; a target that is missing is named."""
    try:
        return loss_fn(output, target)
    except Exception as error:
        if target is not None:
            raise
        raise StageError(
            f"loss_fn raised {type(error).__name__}: {error}; it was called without a target: pass target= on the rank "
            "of the last stage"
        ) from error


def _microbatch(action: Action) -> int:
    return action.microbatch_index or 0


def without_history(output: Any) -> Any:
    """The same tensors, cut off from what made them."""
    return map_tensors(torch.Tensor.detach, output)


_MAKERS: Mapping[ComputationType, Callable[[Workplace, Action], Operation | None]] = {
    FORWARD: Workplace._forward,
    FULL_BACKWARD: Workplace._backward,
    BACKWARD_INPUT: Workplace._input_backward,
    BACKWARD_WEIGHT: Workplace._weight_backward,
    SEND_F: Workplace._send,
    RECV_F: Workplace._receive,
    SEND_B: Workplace._send_gradients,
    RECV_B: Workplace._receive_gradients,
    UNSHARD: Workplace._unshard,
    RESHARD: Workplace._reshard,
    REDUCE_GRAD: Workplace._reduce,
}
