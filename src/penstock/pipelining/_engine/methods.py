"""Runs each action of a rank by the methods of its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.distributed.fsdp import FSDPModule

from penstock.execution.messages import sent_by
from penstock.execution.operation_set import run_in_sequence
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    SHARDING,
    UNSHARD,
)
from penstock.pipelining._engine.operations import (
    post_together,
    receive_backward,
    receive_forward,
    reduction,
    resharding,
    scaling,
    send_backward,
    send_forward,
    unsharding,
)
from penstock.pipelining._schedule.actions import _Action, _get_profiler_function_name
from penstock.pipelining._schedule.passes import OrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.execution.messages import Message
    from penstock.ir.actions import ComputationType
    from penstock.pipelining._engine.step import MethodStep, Operation


class CallConvention(NamedTuple):
    """How a class of schedules calls the stage.

    Attributes:
        saves_outputs: whether the stage gets ``save_forward_output``.
        passes_full_backward: whether it gets ``full_backward`` for a full backward.
        computes_loss: whether there is a loss.
        gathers: whether it runs UNSHARD and RESHARD; else modules gather their parameters themselves.
    """

    saves_outputs: bool = True
    passes_full_backward: bool = True
    computes_loss: bool = True
    gathers: bool = False


class ScaleGradients(NamedTuple):
    """A cell of a row that has no REDUCE_GRAD: divide the gradients of a stage by the number of microbatches."""

    stage_index: int


class Posted(NamedTuple):
    """A cell of a row: transfers that are posted together, under a name that is passed on to what posts them."""

    transfers: tuple[_Action, ...]
    desc: str
    label: str | None = None


class MethodOperations:
    """Runs actions by the methods of the stages, looked up when they run: what a program overrides there counts.

    It refers to stages only, never to the schedule, and so is not part of a reference cycle.

    Args:
        stages: the stages of the rank by index.
        microbatches: how many there are.
        calls: how stages are called.
        trains: whether there are backwards.
        directly: whether messages begin without operations that describe them.
        label: what a profiler shows for a cell.
    """

    def __init__(
        self,
        stages: Mapping[int, Any],
        microbatches: int,
        calls: CallConvention,
        *,
        trains: bool,
        directly: bool = False,
        label: Callable[[Any], str | None] = _get_profiler_function_name,
    ) -> None:
        self.stages = stages
        self.label = label
        self._directly = directly
        self._microbatches = microbatches
        self._calls = calls
        self._trains = trains

    def operation(self, cell: Any) -> Operation | None:
        """Build the operation of a cell; None if there is nothing to do."""
        if isinstance(cell, ScaleGradients):
            return scaling(self.stages[cell.stage_index], self._microbatches) if self._trains else None
        if isinstance(cell, Posted):
            return post_together(self.stages, cell, self._microbatches)
        return self._action(cell)

    def release_sends(self, keys: Sequence[int]) -> Operation:
        """Build the wait for sends, which releases their tensors."""

        def release(step: MethodStep) -> None:
            for key in keys:
                works = step.sends.pop(key, None)
                if works:
                    step.wait(works)

        return release

    def _action(self, action: _Action) -> Operation | None:
        kind, microbatch = action.computation_type, action.microbatch_index
        if kind is OVERLAP_F_B:
            if not action.sub_actions:
                raise OrderError(f"{action!r} has no sub_actions; write e.g. '(2F5;7B3)OVERLAP_F_B'")
            return run_in_sequence(map(self._action, action.parts))
        stage = self.stage(action)
        if kind in SHARDING:
            return self._sharding(stage, kind)
        if microbatch is None:
            raise OrderError(f"{action!r} has no microbatch; write e.g. '{action.stage_index}{kind}0'")
        if kind in (SEND_F, SEND_B):
            key = cast("Message", sent_by(action)).key(self._microbatches)
            send = self._send_forward if kind is SEND_F else self._send_backward
            return send(stage, microbatch, key)
        if kind is RECV_F:
            return self._receive_forward(stage, microbatch)
        if kind is RECV_B:
            return self._receive_backward(stage, microbatch)
        return self._compute(stage, action, microbatch)

    def stage(self, action: _Action) -> Any:
        """Get the stage of an action."""
        return self.stages[action.stage_index]

    def _sharding(self, stage: Any, kind: ComputationType) -> Operation | None:
        if kind is REDUCE_GRAD:
            return reduction(stage, self._microbatches) if self._trains else None
        if not isinstance(stage.submod, FSDPModule):
            return None
        return unsharding(stage) if kind is UNSHARD else resharding(stage)

    def _compute(self, stage: Any, action: _Action, microbatch: int) -> Operation:
        kind, index = action.computation_type, action.stage_index
        before, after = self.stages.get(index - 1), self.stages.get(index + 1)
        if kind is FORWARD:
            return self.forward(stage, microbatch, after, receives=not stage.is_first and before is None)
        receives = not stage.is_last and after is None
        if kind is FULL_BACKWARD:
            return self.backward(stage, microbatch, before, receives=receives)
        if kind is BACKWARD_INPUT:
            return self._backward_input(stage, microbatch, before, receives=receives)
        if kind is BACKWARD_WEIGHT:
            return self._backward_weight(stage, microbatch)
        raise ValueError(f"{action!r} is not an action that a rank can run")

    def forward(self, stage: Any, microbatch: int, after: Any = None, *, receives: bool) -> Operation:
        """Make a forward; ``after`` is the next stage if it is on this rank."""
        key, arrive = (stage.stage_index, microbatch), self._arrival(stage)
        saves, computes_loss = self._calls.saves_outputs, self._calls.computes_loss

        def run_forward(step: MethodStep) -> None:
            if arrive is not None:
                arrive(step)
            if receives:
                works = step.forward_receives.pop(key, None)
                if works is None:
                    raise OrderError(f"{key[0]}F{microbatch} runs before its input is received")
                step.wait(works)
            arguments, keywords = step.arg_mbs[microbatch], step.kwarg_mbs[microbatch]
            if saves:
                output = stage.forward_one_chunk(
                    microbatch, arguments, keywords, save_forward_output=step.return_outputs
                )
            else:
                output = stage.forward_one_chunk(microbatch, arguments, keywords)
            if computes_loss:
                step.schedule._maybe_compute_loss(stage, output, step.target_mbs, microbatch, step.loss_kwargs)
            if after is not None:
                after.set_local_fwd_input(output, microbatch)

        return run_forward

    def backward(self, stage: Any, microbatch: int, before: Any = None, *, receives: bool) -> Operation:
        """Make a whole backward; ``before`` is the stage before if it is on this rank."""
        index, arrive = stage.stage_index, self._arrival(stage)
        key, microbatches = (index, microbatch), self._microbatches
        hand_over = None if before is None else self._hand_over(stage, before, microbatch)
        whole = {"full_backward": True} if self._calls.passes_full_backward else {}

        def run_backward(step: MethodStep) -> None:
            if arrive is not None:
                arrive(step)
            if receives:
                works = step.backward_receives.pop(key, None)
                if works is None:
                    raise OrderError(f"{index}B{microbatch} runs before the gradient of its output is received")
                step.wait(works)
            loss = step.schedule._maybe_get_loss(stage, microbatch)
            counter = step.counter
            counter[index] += 1
            stage.backward_one_chunk(microbatch, loss=loss, last_backward=counter[index] == microbatches, **whole)
            if hand_over is not None:
                hand_over()

        return run_backward

    def _backward_input(self, stage: Any, microbatch: int, before: Any, *, receives: bool) -> Operation:
        arrive, key = self._arrival(stage), (stage.stage_index, microbatch)
        hand_over = None if before is None else self._hand_over(stage, before, microbatch)

        def run_backward_input(step: MethodStep) -> None:
            if arrive is not None:
                arrive(step)
            if receives:
                works = step.backward_receives.pop(key, None)
                if works is None:
                    raise OrderError(f"{key[0]}I{microbatch} runs before the gradient of its output is received")
                step.wait(works)
            loss = step.schedule._maybe_get_loss(stage, microbatch)
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=False, last_backward=False)
            if hand_over is not None:
                hand_over()

        return run_backward_input

    def _backward_weight(self, stage: Any, microbatch: int) -> Operation:
        index, arrive, microbatches = stage.stage_index, self._arrival(stage), self._microbatches

        def run_backward_weight(step: MethodStep) -> None:
            if arrive is not None:
                arrive(step)
            counter = step.counter
            counter[index] += 1
            stage.backward_weight_one_chunk(microbatch, last_backward=counter[index] == microbatches)

        return run_backward_weight

    def _send_forward(self, stage: Any, microbatch: int, key: int) -> Operation:
        return send_forward(stage, microbatch, key, directly=self._directly)

    def _send_backward(self, stage: Any, microbatch: int, key: int) -> Operation:
        return send_backward(stage, microbatch, key, directly=self._directly)

    def _receive_forward(self, stage: Any, microbatch: int) -> Operation:
        return receive_forward(stage, microbatch, directly=self._directly)

    def _receive_backward(self, stage: Any, microbatch: int) -> Operation:
        return receive_backward(stage, microbatch, directly=self._directly)

    def _hand_over(self, stage: Any, before: Any, microbatch: int) -> Callable[[], None]:
        """Give the gradient of the input to the stage before, which is on this rank. An evaluation has made none."""

        def hand_over() -> None:
            before.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

        def hand_over_if_made() -> None:
            if microbatch in getattr(stage, "bwd_cache", (microbatch,)):
                hand_over()

        return hand_over if self._trains else hand_over_if_made

    def _arrival(self, stage: Any) -> Operation | None:
        """Wait for the parameters of a stage, if something else gathers them."""
        if not self._calls.gathers or not isinstance(stage.submod, FSDPModule):
            return None
        return lambda step: step.schedule._assert_unsharded(stage)
