"""Builds operations other than computation: messages, sharded parameters, scaled gradients, the user's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from torch.distributed.fsdp import FSDPModule

from penstock.execution.messages import sent_by
from penstock.ir.actions import RECV_B, RECV_F, SEND_B, SEND_F
from penstock.pipelining._schedule.passes import OrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.pipelining._engine.methods import Posted
    from penstock.pipelining._engine.step import MethodStep, Operation, Works
    from penstock.pipelining._schedule.actions import _Action


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

#: The ways of messages, by the type of the action that posts them.
_METHODS: Final = {SEND_F: _OUTPUTS, RECV_B: _OUTPUT_GRADIENTS, RECV_F: _INPUTS, SEND_B: _INPUT_GRADIENTS}
_SENDING: Final = (SEND_F, SEND_B)


def _begins(
    way: _Way, stage: Any, microbatch: int, labels: tuple[str, ...], *, directly: bool
) -> Callable[[MethodStep], Works]:
    """Begin the messages of a microbatch; ``labels`` are passed on to what posts operations."""
    if directly:
        begin = getattr(stage, way.directly)
        return lambda _: begin(microbatch)
    return lambda step: step.post(getattr(stage, way.operations)(microbatch), *labels)


def send_forward(stage: Any, microbatch: int, key: int, *labels: str, directly: bool = False) -> Operation:
    """Send an output."""
    return _sending(_begins(_OUTPUTS, stage, microbatch, labels, directly=directly), key)


def send_backward(stage: Any, microbatch: int, key: int, *labels: str, directly: bool = False) -> Operation:
    """Send the gradient of an input."""
    return _sending(_begins(_INPUT_GRADIENTS, stage, microbatch, labels, directly=directly), key)


def _sending(begin: Callable[[MethodStep], Works], key: int) -> Operation:
    def send(step: MethodStep) -> None:
        step.sends[key] = begin(step)

    return send


def post_together(stages: Mapping[int, Any], cell: Posted, microbatches: int) -> Operation:
    """Post several transfers at once; a backend with lanes may make one of them."""
    sends = [action for action in cell.transfers if action.computation_type in _SENDING]
    receives = [action for action in cell.transfers if action.computation_type not in _SENDING]
    keys = [message.key(microbatches) for message in map(sent_by, sends) if message is not None]

    def operations_of(actions: Sequence[_Action]) -> list[Any]:
        return [
            operation
            for stage, kind, microbatch, _ in actions
            for operation in getattr(stages[stage], _METHODS[kind].operations)(microbatch)
        ]

    def post(step: MethodStep) -> None:
        sending, receiving = operations_of(sends), operations_of(receives)
        works = step.post(sending + receiving, cell.desc) if sending or receiving else []
        if keys and len(works) == len(sending) + len(receiving):
            step.sends[keys[0]], works = works[: len(sending)], works[len(sending) :]
        for stage, kind, microbatch, _ in receives:
            posted = step.forward_receives if kind is RECV_F else step.backward_receives
            posted[stage, cast("int", microbatch)] = works

    return post


def receive_forward(stage: Any, microbatch: int, *labels: str, directly: bool = False) -> Operation:
    """Start to receive an input."""
    key, begin = (stage.stage_index, microbatch), _begins(_INPUTS, stage, microbatch, labels, directly=directly)

    def receive(step: MethodStep) -> None:
        if key in step.forward_receives:
            raise OrderError(f"{key[0]}RECV_F{microbatch} appears twice, without {key[0]}F{microbatch} in between")
        step.forward_receives[key] = begin(step)

    return receive


def receive_backward(stage: Any, microbatch: int, *labels: str, directly: bool = False) -> Operation:
    """Start to receive the gradient of an output."""
    key = (stage.stage_index, microbatch)
    begin = _begins(_OUTPUT_GRADIENTS, stage, microbatch, labels, directly=directly)

    def receive(step: MethodStep) -> None:
        if key in step.backward_receives:
            raise OrderError(f"{key[0]}RECV_B{microbatch} appears twice, without a backward in between")
        step.backward_receives[key] = begin(step)

    return receive


def scaling(stage: Any, microbatches: int) -> Operation:
    """Divide gradients by the number of microbatches, if the schedule says so."""

    def scale(step: MethodStep) -> None:
        stage.scale_grads(microbatches if step.schedule.scale_grads else 1)

    return scale


def reduction(stage: Any, microbatches: int) -> Operation:
    """Reduce gradients among replicas, and divide them."""

    def reduce(step: MethodStep) -> None:
        stage.perform_reduce_grad(microbatches if step.schedule.scale_grads else 1)

    return reduce


def unsharding(stage: Any) -> Operation:
    """Start to gather the parameters of a stage."""
    index = stage.stage_index

    def unshard(step: MethodStep) -> None:
        schedule = step.schedule
        if index in schedule.unsharded_stages or index in schedule.unshard_ops:
            raise OrderError(f"{index}UNSHARD, but stage {index} is already unsharded")
        for module in _sharded_parts(stage):
            schedule.unshard_ops[index].append(module.unshard(async_op=True))

    return unshard


def resharding(stage: Any) -> Operation:
    """Release the gathered parameters."""
    index = stage.stage_index

    def reshard(step: MethodStep) -> None:
        schedule = step.schedule
        if index not in schedule.unsharded_stages or index in schedule.unshard_ops:
            raise OrderError(
                f"{index}RESHARD, but stage {index} is not unsharded, or has not been used since its UNSHARD"
            )
        for module in _sharded_parts(stage):
            module.reshard()
        schedule.unsharded_stages.remove(index)

    return reshard


def _sharded_parts(stage: Any) -> list[FSDPModule]:
    return [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]
