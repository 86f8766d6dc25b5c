"""Runs the work of a stage for one microbatch, and what ends a step: reducing and scaling gradients."""

from __future__ import annotations

import weakref
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.execution.autograd import is_lazy, needs_gradient
from penstock.pipelining._stage.backward import StageBackward
from penstock.pipelining._stage.gradients import (
    Gradients,
    detach_in_place,
    is_root,
    nothing,
    of_one_kind,
)
from penstock.pipelining._utils import InferenceMode, PipeliningMetadataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class StageCompute(StageBackward):
    """A stage at work."""

    #: The identities of weights that another stage has, too, and divides the gradients of.
    _divided_later: Collection[int] = ()
    #: Whether the gradients of this step are divided.
    _is_divided = False

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a microbatch, once.

        Args:
            bwd_chunk_id: the microbatch.
            loss: its loss, for the last stage.
            full_backward: whether all of it runs; else the gradients of the weights are left to
                ``backward_weight_one_chunk``.
            last_backward: whether it is the last of the step, in which gradients are reduced over replicas.
        """
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        by_keyword = self._by_keyword.pop(bwd_chunk_id, 0)
        is_first, is_last = self.is_first, self.is_last
        # Arguments by keyword belong to the user, and so do their gradients.
        received = inputs[:-by_keyword] if by_keyword else inputs
        if not any(map(is_root, (loss,) if is_last else outputs)):
            self._check_trained(loss, outputs, any(map(needs_gradient, received)))
        elif is_last and isinstance(loss, torch.Tensor) and self._is_lost(loss, received):
            self._check_trained(loss, (), has_inputs=False)
        beginning = {
            "stage_output": loss if is_last else outputs,
            "output_grads": None if is_last else self._output_gradients(bwd_chunk_id, outputs),
            "input_values": received,
        }
        if self.dw_builder or full_backward:
            gradients, _ = self._backward("full", beginning, last_backward)
            if self.dw_builder:
                self._run_or_keep(bwd_chunk_id, full_backward)
            if is_last:  # a loss that is kept would keep the inputs
                detach_in_place((loss,) if is_first else (*outputs, loss))
        else:
            gradients = self._input_half(bwd_chunk_id, beginning, outputs, last_backward)
        gradients = self._agreed(gradients)
        if self._runtime_validate and not is_first:
            what = f"Stage {self.stage_index} backward output (input_grads)"
            self._validate_stage_tensors(what, self._metas_of(bwd_chunk_id).input_grads, gradients)
        self.bwd_cache[bwd_chunk_id] = gradients

    def _agreed(self, gradients: Gradients) -> Gradients:
        """Select the gradients of inputs that were agreed; others belong to a program that passes more inputs."""
        received = self._stage_meta.inputs
        return gradients if received is None or len(gradients) <= len(received) else gradients[: len(received)]

    def _has_own_backward(self) -> bool:
        return not is_unmodified(self, "backward_maybe_with_nosync", "backward_one_chunk")

    def _output_gradients(self, microbatch: int, outputs: tuple[Any, ...]) -> Gradients:
        gradients = self._retrieve_recv_grads(microbatch)
        for index, gradient in enumerate(gradients):
            if gradient is None and self._requires_gradient_now(outputs, index, microbatch):
                raise self._unagreed_gradient(microbatch, index)
        if self._runtime_validate:
            what = f"Stage {self.stage_index} backward input (output_grads)"
            self._validate_stage_tensors(what, self._metas_of(microbatch).output_grads, gradients)
        return gradients

    def _unagreed_gradient(self, microbatch: int, index: int) -> PipeliningMetadataError:
        return PipeliningMetadataError(
            f"stage {self.stage_index} microbatch {microbatch}: output {index} now requires a gradient but did not "
            "when shapes were negotiated, so none is sent back; create a new schedule after unfreezing parameters, or "
            "pass output_args and input_args that require a gradient"
        )

    def _requires_gradient_now(self, outputs: tuple[Any, ...], index: int, microbatch: int) -> bool:
        """Whether an output has a history, and was found to have none before the first step."""
        metas = self._metas_of(microbatch).outputs or ()
        was_found = getattr(self, "_inference_mode", None) == InferenceMode.DYNAMIC
        if not was_found or index >= min(len(metas), len(outputs)) or metas[index].requires_grad:
            return False
        return is_root(outputs[index])

    def _run_or_keep(self, microbatch: int, run: bool) -> None:
        """Run what the user's function gives for the weights now, or keep it until their turn comes."""
        assert self.dw_builder is not None
        runner = self.dw_builder()
        if run:
            runner()
        else:
            self.dw_runner[microbatch] = runner

    def _input_half(
        self, microbatch: int, beginning: dict[str, Any], outputs: tuple[Any, ...], last_backward: bool
    ) -> Gradients:
        self.dw_runner[microbatch] = nothing
        is_last = self.is_last
        if self.is_first:  # no stage waits for a gradient: all of it can wait
            inputs = beginning["input_values"]
            self.backward_state[microbatch] = inputs, None, beginning["stage_output"], beginning["output_grads"]
            return (None,) * len(inputs)
        if is_last:
            beginning["stage_output"] = (beginning["stage_output"],)
        gradients, left = self._backward("input", beginning, last_backward)
        living = self._living((*outputs, *beginning["stage_output"])) if is_last else []
        self.backward_state[microbatch] = (), left, living, None
        return gradients

    def _living(self, values: Iterable[Any]) -> list[weakref.ref[torch.Tensor]]:
        """Refer to what may live on, to cut it off later: the second half may need what is in its graph."""
        return [weakref.ref(one) for one in values if isinstance(one, torch.Tensor)]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of the weights for a microbatch whose inputs have theirs."""
        if not self.has_backward:
            return
        runner = self.dw_runner.pop(bwd_chunk_id, None)
        if runner is None:
            raise AssertionError(
                f"{self.log_prefix} call backward_one_chunk(full_backward=False) for microbatch {bwd_chunk_id} before "
                "backward_weight_one_chunk"
            )
        if self.dw_builder is not None:
            runner()
            return
        inputs, left, outputs, gradients = self.backward_state.pop(bwd_chunk_id)
        if left is None:
            beginning = {"stage_output": outputs, "output_grads": gradients, "input_values": inputs}
            self._backward("full", beginning, last_backward)
            return
        rest = {"stage_output": None, "param_groups": left}
        self._backward("weight", rest, last_backward)
        detach_in_place([one() for one in outputs or ()])

    def clear_runtime_states(self) -> None:
        """Begin a step: forget the one before."""
        super().clear_runtime_states()
        self._without_gradient = None
        if self._split is not None:
            self._split.end_step()

    def _forget_failed_step(self) -> None:
        """End a failed step: leave nothing of it that the program could not clear."""
        if self._parallel is not None:
            self._parallel.drop_gradients()
            self._parallel.end_step()
            self._parallel.reshard()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide all gradients, once in a step: by the number of microbatches if the loss is a mean, by 1 for a sum."""
        self._is_divided = True
        if grad_scale_factor == 1:
            return
        later = self._divided_later
        gradients = [one.grad for one in self.submod.parameters() if one.grad is not None and id(one) not in later]
        for gradient in filter(is_lazy, gradients):
            gradient.div_(grad_scale_factor)
        for alike in of_one_kind([one for one in gradients if not is_lazy(one)]):
            torch._foreach_div_(alike, grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Run REDUCE_GRAD, after all backwards of the step: reduce the gradients over replicas, and scale them."""
        if self._parallel is not None:
            self._parallel.reduce()
            self._parallel.finish_step()
            self._parallel.end_step()
        if grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)


#: What the class has here. A program may replace it, too.
_WRITTEN: Final = {name: getattr(StageCompute, name) for name in dir(StageCompute)}


def is_unmodified(stage: Any, *methods: str) -> bool:
    """Whether neither the class of a stage nor the stage itself has another method in place of one of these."""
    if not isinstance(stage, StageCompute) or not vars(stage).keys().isdisjoint(methods):
        return False
    found, written = _attributes(methods)
    return bool(found(type(stage)) == written)


@cache
def _attributes(names: tuple[str, ...]) -> tuple[attrgetter[Any], Any]:
    """Make a function that finds these attributes; also return what it finds in the class here."""
    written = tuple(_WRITTEN[name] for name in names)
    return attrgetter(*names), written if len(names) > 1 else written[0]
