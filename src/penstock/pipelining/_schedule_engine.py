"""The engine: a rank's actions, compiled once into functions that call the stages; a step is a loop over them.

A function gets the state of the step, and looks methods up on the stage when it runs: so what a program overrides or
replaces on a stage counts. (Where nothing was replaced when the step began, messages may begin directly, and the
functions may be those of ``_schedule_plain``.) A program refers to stages only, never to the schedule, and so is no
part of a cycle.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule

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
from penstock.pipelining._schedule_passes import OrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import Work

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._schedule_actions import _Action

    Works: TypeAlias = "list[Work]"
    #: A stage and a microbatch.
    Key: TypeAlias = "tuple[int, int]"
    #: What is done of an action.
    Operation: TypeAlias = "Callable[[Step], None]"
    #: A function of the user in place of it.
    Custom: TypeAlias = "Callable[[_Action, Any], None]"


@dataclass(slots=True)
class Step:
    """What lives as long as a step.

    Attributes:
        schedule: the schedule that runs.
        arg_mbs: the positional arguments of each microbatch.
        kwarg_mbs: the keyword arguments of each.
        target_mbs: the target of each.
        return_outputs: whether the outputs are kept.
        loss_kwargs: more arguments of the loss.
        post: posts sends or receives.
        wait: waits for them.
        context: makes what a custom function gets.
        forward_receives: activations under way, by stage and microbatch.
        backward_receives: gradients under way.
        counter: how many microbatches of each stage are done.
        sends: what has been sent and not been waited for, by its place in the row.
    """

    schedule: Any
    arg_mbs: list[Any]
    kwarg_mbs: list[Any]
    target_mbs: list[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None
    post: Callable[..., Works]
    wait: Callable[[Works], None]
    context: Callable[[], Any]
    forward_receives: dict[Key, Works] = field(default_factory=dict)
    backward_receives: dict[Key, Works] = field(default_factory=dict)
    counter: Counter[int] = field(default_factory=Counter)
    sends: dict[int, Works] = field(default_factory=dict)


class Line(NamedTuple):
    """A part of a program.

    Attributes:
        run: what is done; None if nothing is.
        label: what a profiler shows for it; None for nothing.
        step: the place of its action in the rank's row.
    """

    run: Operation | None
    label: str | None
    step: int


class Program:
    """What one rank does in a step.

    Attributes:
        scaled: the stages whose gradients it divides by the number of microbatches, if the schedule says so.
    """

    def __init__(self, lines: Sequence[Line], scaled: Sequence[Any]) -> None:
        self.scaled = scaled
        self._lines = lines
        self._steps = [line.step for line in lines if line.run is not None]
        self._operations = [line.run for line in lines if line.run is not None]

    def run(
        self, step: Step, named: Callable[[str], AbstractContextManager[object]], failed: Callable[[int], None]
    ) -> None:
        """Run all of it.

        Args:
            step: the state.
            named: makes the range that a profiler shows.
            failed: is told the place of the action that raises.
        """
        if torch._C._autograd._profiler_enabled():
            self._run_named(step, named, failed)
            return
        place = 0
        try:
            for place, operation in enumerate(self._operations):  # noqa: B007
                operation(step)
        except Exception:
            failed(self._steps[place])
            raise

    def _run_named(
        self, step: Step, named: Callable[[str], AbstractContextManager[object]], failed: Callable[[int], None]
    ) -> None:
        for label, lines in groupby(self._lines, attrgetter("label")):
            with nullcontext() if label is None else named(label):
                for line in lines:
                    try:
                        if line.run is not None:
                            line.run(step)
                    except Exception:
                        failed(line.step)
                        raise


class Calls(NamedTuple):
    """How a class of schedules calls the stage.

    Attributes:
        saves_outputs: whether the stage is told if its outputs are wanted.
        tells_whole: whether it is told that a backward is whole.
        computes_loss: whether there is a loss.
        gathers: whether it runs UNSHARD and RESHARD of its own; else modules gather their parameters themselves.
    """

    saves_outputs: bool = True
    tells_whole: bool = True
    computes_loss: bool = True
    gathers: bool = False


class Maker:
    """Makes operations.

    Args:
        stages: the stages of the rank by index.
        microbatches: how many there are.
        calls: how stages are called.
        trains: whether there are backwards.
        directly: whether messages begin without operations that describe them.
    """

    def __init__(
        self, stages: Mapping[int, Any], microbatches: int, calls: Calls, *, trains: bool, directly: bool = False
    ) -> None:
        self.stages = stages
        self._directly = directly
        self._microbatches = microbatches
        self._calls = calls
        self._trains = trains

    def operation(self, action: _Action, place: int) -> Operation | None:
        """What is done for an action at this place of the row; None if nothing is."""
        kind, microbatch = action.computation_type, action.microbatch_index
        if kind is OVERLAP_F_B:
            if not action.sub_actions:
                raise OrderError(f"{action!r} has no sub_actions; write e.g. '(2F5;7B3)OVERLAP_F_B'")
            return _together([self.operation(part, place) for part in action.leaves])
        stage = self.stage(action)
        if kind in SHARDING:
            return self._sharding(stage, kind)
        if microbatch is None:
            raise OrderError(f"{action!r} has no microbatch; write e.g. '{action.stage_index}{kind}0'")
        if kind is SEND_F:
            return self._send_forward(stage, microbatch, place)
        if kind is SEND_B:
            return self._send_backward(stage, microbatch, place)
        if kind is RECV_F:
            return self._receive_forward(stage, microbatch)
        if kind is RECV_B:
            return self._receive_backward(stage, microbatch)
        return self._compute(stage, action, microbatch)

    def stage(self, action: _Action) -> Any:
        """The stage of an action."""
        try:
            return self.stages[action.stage_index]
        except KeyError:
            mine = ", ".join(map(str, self.stages))
            raise OrderError(
                f"{action!r} stands in the order of this rank, which has stages {mine}: give every rank the stages of "
                "its own row"
            ) from None

    def _sharding(self, stage: Any, kind: ComputationType) -> Operation | None:
        if kind is REDUCE_GRAD:
            return reduction(stage, self._microbatches) if self._trains else None
        if not isinstance(stage.submod, FSDPModule):
            return None
        return _unshard(stage) if kind is UNSHARD else _reshard(stage)

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
        """A forward; ``after`` is the next stage if it is on this rank."""
        key, arrive = (stage.stage_index, microbatch), self._arrival(stage)
        saves, computes_loss = self._calls.saves_outputs, self._calls.computes_loss

        def run_forward(step: Step) -> None:
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
        """A whole backward; ``before`` is the stage before if it is on this rank."""
        index, arrive = stage.stage_index, self._arrival(stage)
        key, microbatches = (index, microbatch), self._microbatches
        hand_over = None if before is None else self._hand_over(stage, before, microbatch)
        whole = {"full_backward": True} if self._calls.tells_whole else {}

        def run_backward(step: Step) -> None:
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

        def run_backward_input(step: Step) -> None:
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

        def run_backward_weight(step: Step) -> None:
            if arrive is not None:
                arrive(step)
            counter = step.counter
            counter[index] += 1
            stage.backward_weight_one_chunk(microbatch, last_backward=counter[index] == microbatches)

        return run_backward_weight

    def _send_forward(self, stage: Any, microbatch: int, place: int) -> Operation:
        return send_forward(stage, microbatch, place, directly=self._directly)

    def _send_backward(self, stage: Any, microbatch: int, place: int) -> Operation:
        return send_backward(stage, microbatch, place, directly=self._directly)

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
        """Wait until the parameters of a stage are there, if somebody else gathers them."""
        if not self._calls.gathers or not isinstance(stage.submod, FSDPModule):
            return None
        return lambda step: step.schedule._assert_unsharded(stage)


class _Way(NamedTuple):
    """A kind of message.

    Attributes:
        operations: the method of a stage that makes operations for those of a microbatch.
        directly: the one that begins them at once.
    """

    operations: str
    directly: str


_OUTPUTS: Final = _Way("get_fwd_send_ops", "_send_outputs")
_OUTPUT_GRADIENTS: Final = _Way("get_bwd_recv_ops", "_receive_gradients")
_INPUTS: Final = _Way("get_fwd_recv_ops", "_receive_inputs")
_INPUT_GRADIENTS: Final = _Way("get_bwd_send_ops", "_send_gradients")


def _begins(
    way: _Way, stage: Any, microbatch: int, told: tuple[str, ...], *, directly: bool
) -> Callable[[Step], Works]:
    """What begins the messages of a microbatch; ``told`` is what whoever posts operations is told about them."""
    if directly:
        begin = getattr(stage, way.directly)
        return lambda _: begin(microbatch)
    return lambda step: step.post(getattr(stage, way.operations)(microbatch), *told)


def send_forward(stage: Any, microbatch: int, place: int, *told: str, directly: bool = False) -> Operation:
    """Send an output."""
    begin = _begins(_OUTPUTS, stage, microbatch, told, directly=directly)

    def send(step: Step) -> None:
        step.sends[place] = begin(step)

    return send


def send_backward(stage: Any, microbatch: int, place: int, *told: str, directly: bool = False) -> Operation:
    """Send the gradient of an input."""
    begin = _begins(_INPUT_GRADIENTS, stage, microbatch, told, directly=directly)

    def send(step: Step) -> None:
        step.sends[place] = begin(step)

    return send


def receive_forward(stage: Any, microbatch: int, *told: str, directly: bool = False) -> Operation:
    """Begin to receive an input."""
    key, begin = (stage.stage_index, microbatch), _begins(_INPUTS, stage, microbatch, told, directly=directly)

    def receive(step: Step) -> None:
        if key in step.forward_receives:
            raise OrderError(f"{key[0]}RECV_F{microbatch} is there twice, without {key[0]}F{microbatch} between")
        step.forward_receives[key] = begin(step)

    return receive


def receive_backward(stage: Any, microbatch: int, *told: str, directly: bool = False) -> Operation:
    """Begin to receive the gradient of an output."""
    key = (stage.stage_index, microbatch)
    begin = _begins(_OUTPUT_GRADIENTS, stage, microbatch, told, directly=directly)

    def receive(step: Step) -> None:
        if key in step.backward_receives:
            raise OrderError(f"{key[0]}RECV_B{microbatch} is there twice, without a backward between")
        step.backward_receives[key] = begin(step)

    return receive


def ending(places: Sequence[int]) -> Operation:
    """Wait for sends, which lets go of their tensors."""

    def end(step: Step) -> None:
        for place in places:
            works = step.sends.pop(place, None)
            if works:
                step.wait(works)

    return end


def custom(function: Custom, action: _Action) -> Operation:
    """A function of the user in place of an action."""

    def run_custom(step: Step) -> None:
        function(action, step.context())

    return run_custom


def scaling(stage: Any, microbatches: int) -> Operation:
    """Divide gradients by the number of microbatches, if the schedule says so."""

    def scale(step: Step) -> None:
        stage.scale_grads(microbatches if step.schedule.scale_grads else 1)

    return scale


def reduction(stage: Any, microbatches: int) -> Operation:
    """Share gradients among replicas, and divide them."""

    def reduce(step: Step) -> None:
        stage.perform_reduce_grad(microbatches if step.schedule.scale_grads else 1)

    return reduce


def _together(operations: Sequence[Operation | None]) -> Operation:
    parts = [operation for operation in operations if operation is not None]

    def overlap(step: Step) -> None:
        for part in parts:
            part(step)

    return overlap


def _unshard(stage: Any) -> Operation:
    index = stage.stage_index

    def unshard(step: Step) -> None:
        schedule = step.schedule
        if index in schedule.unsharded_stages or index in schedule.unshard_ops:
            raise OrderError(f"{index}UNSHARD, but stage {index} is unsharded already")
        for module in _sharded_parts(stage):
            schedule.unshard_ops[index].append(module.unshard(async_op=True))

    return unshard


def _reshard(stage: Any) -> Operation:
    index = stage.stage_index

    def reshard(step: Step) -> None:
        schedule = step.schedule
        if index not in schedule.unsharded_stages or index in schedule.unshard_ops:
            raise OrderError(f"{index}RESHARD, but stage {index} is not unsharded, or was not used since")
        for module in _sharded_parts(stage):
            module.reshard()
        schedule.unsharded_stages.remove(index)

    return reshard


def _sharded_parts(stage: Any) -> list[FSDPModule]:
    return [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]
