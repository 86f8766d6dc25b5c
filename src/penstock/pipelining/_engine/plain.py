"""What a rank does for each action where nothing is replaced on its stages: what their methods do, in one go.

The state is where the methods keep it. So they take over wherever a stage exchanges anything but one plain tensor with
its neighbours; and whoever looks at a stage between steps sees no difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.execution.autograd import accumulate, taken
from penstock.pipelining._engine.methods import MethodOperations
from penstock.pipelining._stage.compute import LEFT, cut_off, flat, nothing
from penstock.pipelining._stage.messages import beginning
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple
from penstock.pipelining._utils import _TensorMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipelining._engine.step import Key, MethodStep, Operation, Works
    from penstock.pipelining._stage.compute import Gradients
    from penstock.pipelining._stage.transfers import Layout, _RecvInfo

    #: Where a backward begins, and with what.
    Root = tuple[torch.Tensor | GradientEdge, torch.Tensor]

#: What is kept of a microbatch that is not there.
_NOTHING: Final[tuple[tuple[Any, ...], list[Any]]] = ((), [])
_NO_STATE: Final[tuple[Any, ...]] = ((), None, (), ())


class PlainMaker(MethodOperations):
    """Makes operations for stages on which nothing is replaced."""

    def forward(self, stage: Any, microbatch: int, after: Any = None, *, receives: bool) -> Operation:
        """A forward."""
        by_methods = super().forward(stage, microbatch, after, receives=receives)
        key, is_first, is_last = (stage.stage_index, microbatch), stage.is_first, stage.is_last
        keeps_all, computes_loss = not self._calls.saves_outputs, self._calls.computes_loss

        def run_forward(step: MethodStep) -> None:
            info = None if is_first else _only(stage.args_recv_info[microbatch])
            if (info is None and not is_first) or (receives and not _waited(step.forward_receives, key)):
                by_methods(step)
                return
            args = step.arg_mbs[microbatch] if info is None else _input(stage, microbatch, info)
            kwargs = step.kwarg_mbs[microbatch] or {}
            try:
                output = stage.submod(*args, **kwargs)
            except Exception as error:
                raise stage._forward_failure(microbatch, args, kwargs, error) from error
            if kwargs:
                stage._keep(microbatch, args, kwargs, _normalize_model_output_as_tuple(output))
            elif not is_last or stage._has_backward or torch.is_grad_enabled():
                stage.fwd_cache[microbatch] = _normalize_model_output_as_tuple(output), flat(args, kwargs)
            if is_last:
                if keeps_all or step.return_outputs:
                    stage._keep_output(microbatch, output)
                if computes_loss:
                    step.schedule._maybe_compute_loss(stage, output, step.target_mbs, microbatch, step.loss_kwargs)
            if after is not None:
                _hand_on(after, microbatch, output)

        return run_forward

    def backward(self, stage: Any, microbatch: int, before: Any = None, *, receives: bool) -> Operation:
        """A whole backward."""
        by_methods = super().backward(stage, microbatch, before, receives=receives)
        index, is_first, is_last = stage.stage_index, stage.is_first, stage.is_last
        root_of = _root_of_loss if is_last else _root_of_output

        def run_backward(step: MethodStep) -> None:
            root = root_of(stage, microbatch, step, receives)
            if root is None:
                by_methods(step)
                return
            outputs, inputs = stage.fwd_cache.pop(microbatch)
            step.counter[index] += 1
            gradients = _whole_backward(stage, root, inputs)
            if is_last:
                cut_off(root[:1] if is_first else (*outputs, root[0]))
            _hand_back(stage, microbatch, gradients, before)

        return run_backward if self._trains else by_methods

    def _backward_input(self, stage: Any, microbatch: int, before: Any, *, receives: bool) -> Operation:
        by_methods = super()._backward_input(stage, microbatch, before, receives=receives)
        is_first, is_last = stage.is_first, stage.is_last
        root_of = _root_of_loss if is_last else _root_of_output

        def run_backward_input(step: MethodStep) -> None:
            ends_at_one = is_first or _has_one_input(stage, microbatch)
            root = root_of(stage, microbatch, step, receives) if ends_at_one else None
            if root is None:
                by_methods(step)
                return
            outputs, inputs = stage.fwd_cache.pop(microbatch)
            stage.dw_runner[microbatch] = nothing
            if is_first:  # nobody waits for a gradient: all of it can wait
                stage.backward_state[microbatch] = inputs, None, root[:1], root[1:]
                stage.bwd_cache[microbatch] = stage._agreed((None,) * len(inputs))
                return
            gradients, left = _input_backward(stage, root, inputs)
            living = stage._living((*outputs, root[0])) if is_last else []
            stage.backward_state[microbatch] = (), left, living, None
            _hand_back(stage, microbatch, gradients, before)

        return run_backward_input if self._trains else by_methods

    def _backward_weight(self, stage: Any, microbatch: int) -> Operation:
        by_methods = super()._backward_weight(stage, microbatch)
        index = stage.stage_index

        def run_backward_weight(step: MethodStep) -> None:
            inputs, left, outputs, gradients = stage.backward_state.get(microbatch, _NO_STATE)
            if left is None and not _begins_at_one(outputs, gradients):
                by_methods(step)
                return
            del stage.backward_state[microbatch], stage.dw_runner[microbatch]
            step.counter[index] += 1
            if left is None:
                _whole_backward(stage, (*outputs, *gradients), inputs)
                return
            stage._weight_backward({"param_groups": left})
            if outputs:
                cut_off([one() for one in outputs])

        return run_backward_weight if self._trains else by_methods

    def _send_forward(self, stage: Any, microbatch: int, key: int) -> Operation:
        by_methods = super()._send_forward(stage, microbatch, key)

        def send(step: MethodStep) -> None:
            outputs, inputs = stage.fwd_cache.get(microbatch, _NOTHING)
            layout = _only_layout(stage._output_layouts, stage._metas_of(microbatch).outputs)
            targets = stage.act_send_info.get(0, ())
            if layout is None or len(outputs) != 1 or len(targets) != 1 or type(outputs[0]) is not torch.Tensor:
                by_methods(step)
                return
            tensor = outputs[0].detach()  # it has no history, or the operation would keep all of it
            if not layout.fits(tensor) or targets[0] is None:
                by_methods(step)
                return
            step.sends[key] = [stage._connection(targets[0]).send(tensor)]
            if stage._has_backward:
                stage.fwd_cache[microbatch] = (beginning(outputs[0]),), inputs
            else:
                stage._give_up_outputs(microbatch, outputs, inputs)

        return send

    def _send_backward(self, stage: Any, microbatch: int, key: int) -> Operation:
        by_methods = super()._send_backward(stage, microbatch, key)

        def send(step: MethodStep) -> None:
            gradients: Sequence[Any] = stage.bwd_cache.get(microbatch, ())
            targets: Sequence[Any] = stage.grad_send_info or ()
            layout = _only_layout(stage._gradient_layouts, stage._metas_of(microbatch).input_grads)
            if layout is None or len(gradients) != 1 or len(targets) != 1 or type(gradients[0]) is not torch.Tensor:
                by_methods(step)
                return
            if not layout.fits(gradients[0]) or targets[0] is None:
                by_methods(step)
                return
            del stage.bwd_cache[microbatch]
            step.sends[key] = [stage._connection(targets[0]).send(gradients[0])]

        return send

    def _receive_forward(self, stage: Any, microbatch: int) -> Operation:
        by_methods, key = super()._receive_forward(stage, microbatch), (stage.stage_index, microbatch)

        def receive(step: MethodStep) -> None:
            if not _received(stage, stage.args_recv_info[microbatch], step.forward_receives, key):
                by_methods(step)

        return receive

    def _receive_backward(self, stage: Any, microbatch: int) -> Operation:
        by_methods, key = super()._receive_backward(stage, microbatch), (stage.stage_index, microbatch)

        def receive(step: MethodStep) -> None:
            if not _received(stage, stage.grad_recv_info[microbatch], step.backward_receives, key):
                by_methods(step)

        return receive if self._trains and not stage.is_last else by_methods


def _received(stage: Any, infos: tuple[_RecvInfo, ...], receives: dict[Key, Works], key: Key) -> bool:
    """Begin to receive what comes, if it is one plain tensor; False if it is not."""
    info = _only(infos)
    if info is None or info.buffer is not None or key in receives:
        return False
    receives[key] = [stage._connection(info.source).receive(info.allocate(stage.device))]
    return True


def _only(infos: tuple[_RecvInfo, ...]) -> _RecvInfo | None:
    """What comes, if it is one plain tensor."""
    if len(infos) == 1:
        (info,) = infos
        if type(info.tensor_meta) is _TensorMeta and not info.is_root_arg:
            return info
    return None


def _only_layout(layouts: Any, metas: Any) -> Layout | None:
    """The layout of what is described, if it is one tensor."""
    return None if metas is None or len(metas) != 1 else layouts.of(metas)[0]


def _waited(receives: dict[Key, Works], key: Key) -> bool:
    """Wait for what was to be received; False if nothing was."""
    works = receives.pop(key, None)
    if works is None:
        return False
    for work in works:
        work.wait()
    return True


def _input(stage: Any, microbatch: int, info: _RecvInfo) -> tuple[torch.Tensor, ...]:
    """The input of a microbatch, as a leaf of its graph."""
    buffer, meta = info.buffer, info.tensor_meta
    if buffer is None or meta is None or not buffer.is_leaf:
        received: tuple[torch.Tensor, ...] = stage._retrieve_recv_activations(microbatch)
        return received
    buffer.requires_grad_(meta.requires_grad and stage._has_backward and torch.is_grad_enabled())
    info.forget()
    return (buffer,)


def _hand_on(after: Any, microbatch: int, output: Any) -> None:
    """Give an output to the next stage, which is on this rank."""
    info = _only(after.args_recv_info[microbatch])
    if info is not None and type(output) is torch.Tensor:
        info.put(output.detach())
    else:
        after.set_local_fwd_input(output, microbatch)


def _hand_back(stage: Any, microbatch: int, gradients: Gradients, before: Any) -> None:
    """Give the gradients of inputs to the stage before if it is on this rank, or keep them to be sent."""
    if before is None:
        stage.bwd_cache[microbatch] = gradients
        return
    info = _only(before.grad_recv_info[microbatch])
    if info is not None and len(gradients) == 1 and type(gradients[0]) is torch.Tensor:
        info.put(gradients[0])
    else:
        before.set_local_bwd_input(gradients, microbatch)


def _root_of_loss(stage: Any, microbatch: int, step: MethodStep, _receives: bool) -> Root | None:
    """Where the backward of a microbatch in the last stage begins; None if that is not at a loss of one number."""
    if microbatch not in stage.fwd_cache or microbatch in stage._by_keyword:
        return None
    loss = step.schedule._maybe_get_loss(stage, microbatch)
    if type(loss) is not torch.Tensor or not loss.requires_grad or loss.numel() != 1:
        return None
    return loss, torch.ones_like(loss)


def _root_of_output(stage: Any, microbatch: int, step: MethodStep, receives: bool) -> Root | None:
    """The same in another stage; None if it does not begin at one tensor, or nothing has come."""
    outputs, _ = stage.fwd_cache.get(microbatch, _NOTHING)
    info = _only(stage.grad_recv_info[microbatch])
    if info is None or len(outputs) != 1 or not _is_root(outputs[0]) or microbatch in stage._by_keyword:
        return None
    if receives and not _waited(step.backward_receives, (stage.stage_index, microbatch)):
        return None
    gradient = info.buffer
    if gradient is None:
        return None
    info.forget()
    return outputs[0], gradient


def _has_one_input(stage: Any, microbatch: int) -> bool:
    """Whether a backward in halves ends at one tensor, which is a leaf."""
    _, inputs = stage.fwd_cache.get(microbatch, _NOTHING)
    return len(inputs) == 1 and type(inputs[0]) is torch.Tensor and inputs[0].requires_grad and inputs[0].is_leaf


def _begins_at_one(outputs: Any, gradients: Any) -> bool:
    """Whether the backward of these outputs with these gradients begins at one tensor."""
    if type(outputs) is not tuple or type(gradients) is not tuple or len(outputs) != 1 or len(gradients) != 1:
        return False
    return type(gradients[0]) is torch.Tensor and _is_root(outputs[0])


def _is_root(output: Any) -> bool:
    return type(output) is GradientEdge or (type(output) is torch.Tensor and output.requires_grad)


def _whole_backward(stage: Any, root: Root, inputs: list[Any]) -> Gradients:
    if stage._without_gradient is None:
        stage._watch_gradients()
    if stage._split is not None:
        stage._split.before_whole_backward()
    try:
        accumulate(root[:1], root[1:])
    except Exception as error:
        raise _failure(stage, "backward", root, inputs, error) from error
    if stage._without_gradient:
        stage._own_gradients()
    if not stage.is_first and len(inputs) == 1 and type(inputs[0]) is torch.Tensor and inputs[0].is_leaf:
        return tuple(taken(inputs))
    gradients: Gradients = stage._agreed(stage._gradients_of(inputs))
    return gradients


def _input_backward(stage: Any, root: Root, inputs: list[Any]) -> tuple[Gradients, list[dict[str, Any]]]:
    output, gradient = root
    stage._watch_gradients()
    try:
        edge = output if type(output) is GradientEdge else get_gradient_edge(output)  # type: ignore[arg-type]
        found, left = stage._splitter().input_backward((edge,), (gradient,), inputs)
    except Exception as error:
        raise _failure(stage, "backward input", root, inputs, error) from error
    stage._own_gradients()
    return tuple(found), [{LEFT: left}]


def _failure(stage: Any, what: str, root: Root, inputs: list[Any], error: Exception) -> RuntimeError:
    told: dict[str, Any] = {"stage_output": root[:1], "output_grads": root[1:], "input_values": inputs}
    if stage.is_last:
        told |= {"stage_output": root[0] if what == "backward" else root[:1], "output_grads": None}
    failure: RuntimeError = stage._failure(what, told, error)
    return failure
