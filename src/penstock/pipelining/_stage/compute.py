"""The work of a stage for one microbatch: forward, backward, and the two halves of a backward."""

from __future__ import annotations

import weakref
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.execution.autograd import is_lazy, pop_gradients, run_backward, unshare_gradients
from penstock.execution.split_backward.split import SplitBackward
from penstock.pipelining._debug import map_debug_info
from penstock.pipelining._stage.sharing import check_unmodified, watch
from penstock.pipelining._stage.training_check import TrainingCheck, needs_gradient
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple
from penstock.pipelining._utils import (
    InferenceMode,
    PipeliningMetadataError,
    TensorMeta,
    flatten_args,
    validate_tensors_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.execution.data_parallel.adapter import BackwardKind

Gradients = tuple[torch.Tensor | None, ...]
#: The name, in what the first half of a backward leaves, of the second.
WEIGHT_BACKWARD: Final = "weight_backward"


class StageCompute(TrainingCheck):
    """A stage at work."""

    _split: SplitBackward | None = None
    _without_gradient: list[torch.Tensor] | None = None
    #: The identities of weights that another stage has, too, and divides the gradients of.
    _divided_later: Collection[int] = ()
    #: Whether the gradients of this step are divided.
    _is_divided = False

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the module for a microbatch.

        Args:
            fwd_chunk_id: the microbatch.
            args: what the first stage is called with; the others take what they have received.
            kwargs: further arguments, for any stage.
            save_forward_output: whether the last stage keeps what it returns in ``output_chunks``.

        Returns:
            What the module returns.
        """
        if not self.is_first:
            args = self._retrieve_recv_activations(fwd_chunk_id)
        kwargs = kwargs or {}
        if self._runtime_validate:
            self._validate_stage_tensors(
                f"Stage {self.stage_index} forward inputs", self._metas_of(fwd_chunk_id).inputs, args
            )
        watched = watch(args, self._shared_inputs) if self._shared_inputs and not self.is_first else ()
        try:
            output = (self.submod if self._is_plain else self.forward_maybe_with_nosync)(*args, **kwargs)
        except Exception as error:
            raise self._forward_failure(fwd_chunk_id, args, kwargs, error) from error
        if watched:
            check_unmodified(watched, self.stage_index, fwd_chunk_id)
        outputs = _normalize_model_output_as_tuple(output)
        is_last = self.is_last
        if is_last and save_forward_output:
            self._keep_output(fwd_chunk_id, output)
        if self._runtime_validate and not is_last:
            self._validate_stage_tensors(
                f"Stage {self.stage_index} forward outputs", self._metas_of(fwd_chunk_id).outputs, outputs
            )
        self._keep(fwd_chunk_id, args, kwargs, outputs)
        return output

    def _keep_output(self, microbatch: int, output: Any) -> None:
        self.output_chunks.append(output)
        self._output_microbatches.append(microbatch)

    def _order_outputs(self) -> None:
        """Put the outputs of a step in the order of its microbatches, in which an order may not have run them."""
        numbers = self._output_microbatches
        if len(numbers) == len(self.output_chunks) and any(map(int.__gt__, numbers, numbers[1:])):
            places = sorted(range(len(numbers)), key=numbers.__getitem__)
            self.output_chunks[:] = [self.output_chunks[place] for place in places]
            numbers.sort()

    def _keep(self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Any, ...]) -> None:
        """Keep what a backward begins and ends with.

        Outputs that nothing can be differentiated of are kept only to be sent.
        """
        if self._has_backward or torch.is_grad_enabled() or not (self.is_last or self._is_next_local()):
            self.fwd_cache[microbatch] = outputs, flat(args, kwargs)
            if kwargs:
                self._by_keyword[microbatch] = len(flatten_args(kwargs))

    def _is_next_local(self) -> bool:
        """Whether the next stage is on this rank, and takes the outputs as they are."""
        rank_of: dict[int, int] = getattr(self, "stage_index_to_group_rank", {})
        return rank_of.get(self.stage_index + 1) == getattr(self, "group_rank", None)

    def _forward_failure(
        self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> RuntimeError:
        return RuntimeError(
            f"{self.log_prefix} failed to run forward of microbatch {microbatch}: {type(error).__name__}: "
            f"{error}\nargs: {map_debug_info(args)}\nkwargs: {map_debug_info(kwargs)}"
        )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; one that shares gradients with other replicas does not in this microbatch."""
        parallel = self._parallel
        if parallel is None:
            return self.submod(*args, **kwargs)
        with parallel.forward():
            return self.submod(*args, **kwargs)

    def _validate_stage_tensors(
        self, desc: str, expected: tuple[TensorMeta | None, ...] | None, actual: tuple[Any, ...]
    ) -> None:
        if expected is None:
            raise PipeliningMetadataError(f"{desc}: no metadata available to compare with")
        validate_tensors_metadata(desc, expected, actual)

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
            last_backward: whether it is the last of the step, in which gradients are shared with other replicas.
        """
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        by_keyword = self._by_keyword.pop(bwd_chunk_id, 0)
        is_first, is_last = self.is_first, self.is_last
        # Arguments by keyword belong to the user, and so do their gradients.
        received = inputs[:-by_keyword] if by_keyword else inputs
        if not any(map(_is_root, (loss,) if is_last else outputs)):
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
        return _is_root(outputs[index])

    def _run_or_keep(self, microbatch: int, run: bool) -> None:
        """What the user's function gives for the weights: now, or when their turn comes."""
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
        """What may live on is cut off later: the second half may need what is in its graph."""
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

    def _backward(
        self, kind: str, beginning: dict[str, Any], last_backward: bool
    ) -> tuple[Gradients, list[dict[str, Any]] | None]:
        if self._is_plain:
            return _BACKWARDS[kind](self, beginning)
        return self.backward_maybe_with_nosync(kind, beginning, last_backward=last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Gradients, list[dict[str, Any]] | None]:
        """Run a backward; gradients are shared with other replicas in the last one of a step, or after it.

        Args:
            backward_type: ``full``, ``input`` or ``weight``.
            bwd_kwargs: where it begins (``stage_output``, ``output_grads``) and ends (``input_values``), or what the
                first half has left (``param_groups``).
            last_backward: whether it is the last one.

        Returns:
            The gradients of the inputs, and what is left for the weights.
        """
        run = _BACKWARDS.get(backward_type)
        if run is None:
            raise RuntimeError(f"unknown backward_type {backward_type!r}; expected 'full', 'input' or 'weight'")
        if self._parallel is None:
            return run(self, bwd_kwargs)
        return self._parallel.run_backward(
            cast("BackwardKind", backward_type),
            partial(run, self, bwd_kwargs),
            outputs=bwd_kwargs.get("stage_output"),
            last=last_backward,
        )

    def _full_backward(self, beginning: dict[str, Any], *, of_any_size: bool = False) -> tuple[Gradients, None]:
        inputs = beginning["input_values"]
        self._note_missing_gradients()
        try:
            roots, gradients = _roots(beginning["stage_output"], beginning["output_grads"], of_any_size)
            if roots:
                self._before_whole_backward()
                run_backward(roots, gradients)
        except Exception as error:
            raise self._failure("backward", beginning, error) from error
        self._own_gradients()
        return self._gradients_of(inputs), None

    def _gradients_of(self, inputs: Sequence[Any]) -> Gradients:
        """The gradients of inputs after a backward; those of the model's own inputs are the user's, and stay there."""
        return kept_gradients(inputs) if self.is_first else _taken(inputs)

    def _input_backward(self, beginning: dict[str, Any]) -> tuple[Gradients, list[dict[str, Any]]]:
        inputs = beginning["input_values"]
        wanted = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        if not all(one.is_leaf for one in wanted) or not (self._is_plain or self._splits_backward()):
            return self._full_backward(beginning, of_any_size=True)[0], [{WEIGHT_BACKWARD: nothing}]
        self._note_missing_gradients()
        try:
            roots, gradients = _roots(beginning["stage_output"], beginning["output_grads"], of_any_size=True)
            found, left = self._halved(roots, gradients, wanted)
        except Exception as error:
            raise self._failure("backward input", beginning, error) from error
        self._own_gradients()
        if len(wanted) < len(inputs):
            each = iter(found)
            found = [next(each) if needs_gradient(one) else None for one in inputs]
        return tuple(found), [{WEIGHT_BACKWARD: left}]

    def _splits_backward(self) -> bool:
        return self._parallel is None or self._parallel.splits_backward

    def _halved(
        self,
        roots: Sequence[Any],
        gradients: Sequence[torch.Tensor],
        wanted: list[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor | None], Callable[[], None]]:
        if not roots:
            return [None] * len(wanted), nothing
        edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
        return self._splitter().input_backward(edges, gradients, wanted)

    def _splitter(self) -> SplitBackward:
        alone = self._parallel is None
        if self._split is None or self._split.adds_in_place != alone:
            self._split = SplitBackward(adds_in_place=alone)
        return self._split

    def _before_whole_backward(self) -> None:
        if self._split is not None:
            self._split.before_whole_backward()

    def _weight_backward(self, rest: dict[str, Any]) -> tuple[Gradients, None]:
        self._note_missing_gradients()
        for left in rest["param_groups"]:
            left.pop(WEIGHT_BACKWARD)()
        self._own_gradients()
        return (), None

    def _note_missing_gradients(self) -> None:
        """Find out, once in a step, which parameters have no gradient yet."""
        if self._without_gradient is None:
            has_parameters = isinstance(self.submod, torch.nn.Module) and not self._has_gradients_in_buckets()
            parameters = self.submod.parameters() if has_parameters else ()
            self._without_gradient = [one for one in parameters if one.requires_grad and one.grad is None]

    def _own_gradients(self) -> None:
        if self._without_gradient and not self._has_gradients_in_buckets():
            self._without_gradient = unshare_gradients(self._without_gradient)

    def _has_gradients_in_buckets(self) -> bool:
        return self._parallel is not None and self._parallel.gradients_in_buckets

    def _failure(self, what: str, beginning: Mapping[str, Any], error: Exception) -> RuntimeError:
        info = {name: map_debug_info(value) for name, value in beginning.items()}
        return RuntimeError(
            f"{self.log_prefix} Failed to run stage {what}: {type(error).__name__}: {error}\n"
            f"Stage output: {info['stage_output']}\nOutput gradient: {info['output_grads']}\n"
            f"Input: {info['input_values']}"
        )

    def _loss_failure(self, loss: torch.Tensor, inputs: Sequence[Any]) -> RuntimeError:
        """The error of a backward that would have to begin at several numbers."""
        beginning = {"stage_output": loss, "output_grads": None, "input_values": inputs}
        return self._failure("backward", beginning, _unseeded(loss))

    def clear_runtime_states(self) -> None:
        """A step begins: forget the one before."""
        super().clear_runtime_states()
        self._without_gradient = None
        if self._split is not None:
            self._split.end_step()

    def _forget_failed_step(self) -> None:
        """A step has failed: leave nothing of it that the program could not clear."""
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
        """REDUCE_GRAD: all backwards of the step are done. Share the gradients with other replicas, and scale them."""
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
    """What finds these attributes, and what it finds in the class here."""
    written = tuple(_WRITTEN[name] for name in names)
    return attrgetter(*names), written if len(names) > 1 else written[0]


def of_one_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors apart by their type: one operation on many does not take DTensors together with others."""
    kinds: dict[type, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(type(tensor), []).append(tensor)
    return list(kinds.values())


_BACKWARDS: Final[dict[str, Callable[[StageCompute, dict[str, Any]], tuple[Gradients, Any]]]] = {
    "full": StageCompute._full_backward,
    "input": StageCompute._input_backward,
    "weight": StageCompute._weight_backward,
}


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All that a module is called with, without the containers that it comes in."""
    for value in args:
        if not isinstance(value, torch.Tensor):
            break
    else:
        return [*args, *flatten_args(kwargs)] if kwargs else list(args)
    return [*flatten_args(args), *flatten_args(kwargs)]


def _roots(outputs: Any, gradients: Any, of_any_size: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Where a backward begins, and with what. A loss begins with ones; ``of_any_size`` allows more than one number.

    An output without a gradient is one that the next stage has no use for.
    """
    if isinstance(outputs, torch.Tensor):
        if not outputs.requires_grad:
            return [], []
        if gradients is None:
            if outputs.numel() != 1 and not of_any_size:
                raise _unseeded(outputs)
            gradients = torch.ones_like(outputs)
        return [outputs], [gradients]
    outputs = outputs or ()
    if gradients is None:
        gradients = [torch.ones_like(one) if needs_gradient(one) else None for one in outputs if of_any_size]
    roots, known = [], []
    for output, gradient in zip(outputs, gradients, strict=bool(gradients)):
        if gradient is not None and _is_root(output):
            roots.append(output)
            known.append(gradient)
    return roots, known


def _unseeded(loss: torch.Tensor) -> RuntimeError:
    return RuntimeError(f"the loss must be one number, not a tensor of shape {tuple(loss.shape)}")


def _is_root(value: Any) -> bool:
    return isinstance(value, GradientEdge) or needs_gradient(value)


def _taken(inputs: Sequence[Any]) -> Gradients:
    """The gradients of inputs, taken away from them."""
    for value in inputs:
        if type(value) is not torch.Tensor or not (value.is_leaf or value.retains_grad):
            break
    else:
        return tuple(pop_gradients(inputs))
    found = []
    for value in inputs:
        gradient = value.grad if needs_gradient(value) and (value.is_leaf or value.retains_grad) else None
        if gradient is not None:
            value.grad = None
        found.append(gradient)
    return tuple(found)


def kept_gradients(inputs: Sequence[Any]) -> Gradients:
    """The gradients of what the model was called with: they are the user's, and stay where they are."""
    return tuple([value.grad if needs_gradient(value) and value.is_leaf else None for value in inputs])


def detach_in_place(outputs: Sequence[Any]) -> None:
    """Free the graph of outputs that live on. That of a view cannot be cut off in place."""
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None and not output._is_view():
            output.detach_()


def nothing() -> None:
    """The second half of a backward that has only one."""
