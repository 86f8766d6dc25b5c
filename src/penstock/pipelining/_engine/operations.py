"""Operations that are no computation: messages, sharded parameters, gradients that are divided, the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.distributed.fsdp import FSDPModule

from penstock.pipelining._schedule.passes import OrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.pipelining._engine.program import Custom, Operation, Step, Works
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
    return _sending(_begins(_OUTPUTS, stage, microbatch, told, directly=directly), place)


def send_backward(stage: Any, microbatch: int, place: int, *told: str, directly: bool = False) -> Operation:
    """Send the gradient of an input."""
    return _sending(_begins(_INPUT_GRADIENTS, stage, microbatch, told, directly=directly), place)


def _sending(begin: Callable[[Step], Works], place: int) -> Operation:
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


def together(operations: Sequence[Operation | None]) -> Operation:
    """The parts of an overlap, one after another."""
    parts = [operation for operation in operations if operation is not None]

    def overlap(step: Step) -> None:
        for part in parts:
            part(step)

    return overlap


def unsharding(stage: Any) -> Operation:
    """Begin to gather the parameters of a stage."""
    index = stage.stage_index

    def unshard(step: Step) -> None:
        schedule = step.schedule
        if index in schedule.unsharded_stages or index in schedule.unshard_ops:
            raise OrderError(f"{index}UNSHARD, but stage {index} is unsharded already")
        for module in _sharded_parts(stage):
            schedule.unshard_ops[index].append(module.unshard(async_op=True))

    return unshard


def resharding(stage: Any) -> Operation:
    """Let go of what was gathered."""
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
