"""Finds the metadata of a stage's tensors by a dry run through all stages.

The first stage is run with its real arguments and sends its output's metadata to the next, and so on; then back for the
gradients. Such a run leaves random numbers, buffers and gradients as they were.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.execution.autograd import is_differentiable
from penstock.execution.dry_run import Call, dry_run
from penstock.execution.microbatch_kinds import find_kinds
from penstock.execution.preserved_state import copy_as_leaves
from penstock.pipelining._backward import _autograd_grad_for_inputs
from penstock.pipelining._stage.announcement import DetailedForwardMeta, decode, encode
from penstock.pipelining._stage.sharing import find_shared, kin_among, merge_groups
from penstock.pipelining._stage.votes import StageVotes
from penstock.pipelining._utils import (
    PipeliningMetadataError,
    TensorMeta,
    _derive_grad_metas,
    _DTensorMeta,
    _StageBackwardMeta,
    _StageForwardMeta,
    _StageMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    flatten_args,
    validate_and_normalize_to_tuple,
    validate_tensors_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class StageInference(StageVotes):
    """A stage that infers the metadata of its tensors."""

    _fwd_outputs_for_bwd_meta: tuple[torch.Tensor, ...] | None = None
    _fwd_inputs_for_bwd_meta: tuple[torch.Tensor, ...] | None = None
    _fwd_kwargs_tensors_for_bwd_meta: tuple[torch.Tensor, ...] | None = None

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Send metadata to a stage on another rank."""
        for tensor in encode(meta):
            self._transfer(dist.isend, tensor.to(self.device), dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        """Receive metadata from a stage on another rank."""
        return decode(lambda tensor: self._transfer(dist.irecv, tensor, src_stage), self.device)

    def _transfer(self, op: Any, tensor: torch.Tensor, stage: int) -> None:
        # In a batch, because that is how later operations may go: their connection comes up here.
        peer = self._resolve_peer_global_rank(stage)
        for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, self.group)]):
            work.wait()

    def _forward_metadata_inference(
        self,
        args: tuple[torch.Tensor, ...] | _StageForwardMeta | None,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> _StageForwardMeta | None:
        """Run the stage in a dry run, and send the next one its output's metadata.

        Args:
            args: real arguments for the first stage; what a stage before on the same rank tells.
            kwargs: real arguments by keyword.
            has_backward: whether gradients will be needed.

        Returns:
            The metadata for the next stage; None if it was sent, to another rank.
        """
        inputs, further = self._inference_inputs(args)
        outputs, copies = self._dry_run(inputs, kwargs, has_backward)
        self._stage_meta.outputs = extract_tensor_metas(outputs)
        runs = [(other, *self._dry_run(other, named, has_backward)) for other, named in further]
        self._other_metas = tuple(
            _StageMeta(extract_tensor_metas(other), extract_tensor_metas(results)) for other, results, _ in runs
        )
        self._shared_outputs = merge_groups(
            find_shared(results or (), call.kin) for _, results, call in [(inputs, outputs, copies), *runs]
        )
        # Only how gradients are distributed cannot be known without making them.
        distributed = has_backward and self._stage_meta.has_dtensors()
        self._fwd_outputs_for_bwd_meta = outputs if distributed else ()
        self._fwd_inputs_for_bwd_meta = copies.args if distributed else ()
        tensors = [value for value in flatten_args(copies.kwargs) if isinstance(value, torch.Tensor)]
        self._fwd_kwargs_tensors_for_bwd_meta = tuple(tensors) if distributed else ()
        if self._stage_meta.outputs is None:
            raise PipeliningMetadataError(f"stage {self.stage_index} returned None, but the next stage needs tensors")
        meta = _StageForwardMeta(self._stage_meta.outputs)
        if self._kinds or self._shared_outputs:
            others = tuple(metas.outputs or () for metas in self._other_metas)
            meta = DetailedForwardMeta(self._stage_meta.outputs, self._kinds, others, self._shared_outputs)
        if self.is_last or self._is_same_rank(self.stage_index + 1):
            return meta
        self._send_meta(meta, self.stage_index + 1)
        return None

    def _inference_inputs(
        self, args: tuple[torch.Tensor, ...] | _StageForwardMeta | None
    ) -> tuple[tuple[torch.Tensor, ...], list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]]:
        """Get what to run the stage with: real arguments, or zeros that look like what will come.

        Where microbatches differ in their shapes, also one of every further kind, with its arguments by keyword.
        """
        if self.is_first:
            if args is None or isinstance(args, _StageForwardMeta):
                raise PipeliningMetadataError(
                    f"stage {self.stage_index} is the first and needs the arguments of the model, not "
                    f"{type(args).__name__}; pass them to step() on its rank"
                )
            tensors = validate_and_normalize_to_tuple(args) or ()
            self._stage_meta.inputs = extract_tensor_metas(tensors)
            self._mesh_cache.update_from_tensors(tensors)
            kinds = find_kinds(*self._next_microbatches)[0]
            self._kinds = kinds if len(set(kinds)) > 1 else ()
            self._shared_inputs = ()
            called = [self._next_microbatches[0][microbatch] for microbatch in self._first_of_kind()]
            return self._stand_ins(tensors), [
                self._call(one) for one in zip(called, self._first_of_kind(), strict=True)
            ]
        received = args if self._is_same_rank(self.stage_index - 1) else self._recv_meta(self.stage_index - 1)
        if not isinstance(received, _StageForwardMeta):
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: stage {self.stage_index - 1} sent {type(received).__name__}, but the "
                "metadata of its outputs is needed"
            )
        self._stage_meta.inputs = received.forward_metas
        if not isinstance(received, DetailedForwardMeta):
            received = DetailedForwardMeta(received.forward_metas)
        self._kinds, others, self._shared_inputs = received.kinds, received.others, received.shared
        further = [self._call(one) for one in zip(others, self._first_of_kind(), strict=True)]
        return self._stand_ins(received.forward_metas), further

    def _first_of_kind(self) -> list[int]:
        """Find the first microbatch of every kind but the first."""
        return [self._kinds.index(kind) for kind in sorted(set(self._kinds) - {0})]

    def _call(self, one: tuple[Any, int]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        values, microbatch = one
        kwargs = self._next_microbatches[1][microbatch] if self._next_microbatches[1] else {}
        return self._stand_ins(validate_and_normalize_to_tuple(values) if self.is_first else values), kwargs

    def _stand_ins(self, values: Any) -> tuple[torch.Tensor, ...]:
        """Make arguments for a dry run: real ones as they are, zeros for described ones (valid indices)."""
        tensors = tuple(map(self._to_tensor, values))
        if not self.is_first:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.zero_()
        return tensors

    def _dry_run(
        self, inputs: tuple[torch.Tensor, ...], kwargs: dict[str, Any] | None, has_backward: bool
    ) -> tuple[tuple[torch.Tensor, ...] | None, Call]:
        """Run the module; return what it returns, and the copies that it was called with."""
        with nullcontext() if self._parallel is None else self._parallel.forward():
            outputs, copies = dry_run(
                self.submod,
                torch.device(self.device),
                Call(inputs, kwargs or {}, kin_among(inputs, self._shared_inputs)),
                run=partial(self._compute_outputs, module=self.submod),
                gradients=has_backward,
            )
        if self.is_last:  # which may return anything, for the loss
            outputs = tuple(value for value in flatten_args(outputs) if isinstance(value, torch.Tensor))
        return validate_and_normalize_to_tuple(outputs), copies

    def _compute_outputs(self, *args: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> Any:
        """Run the module in a dry run."""
        return module(*args, **kwargs)

    def _compute_input_grads(
        self,
        outputs: list[torch.Tensor],
        all_fwd_inputs: list[torch.Tensor],
        grad_outputs: list[torch.Tensor | None] | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Run a backward in a dry run: gradients are returned, and not accumulated."""
        return _autograd_grad_for_inputs(outputs, all_fwd_inputs, grad_outputs, allow_unused=True)

    def _backward_metadata_inference(
        self,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: torch.Tensor | None = None,
        received_grad_meta: _StageBackwardMeta | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> _StageBackwardMeta | None:
        """Find the gradients' metadata, and send it to the previous stage.

        Args:
            loss_fn: the loss, for the last stage.
            target: the first microbatch's target, for the last stage.
            received_grad_meta: what a next stage on the same rank tells.
            loss_kwargs: further arguments of the loss.

        Returns:
            The metadata for the previous stage; None if it was sent, to another rank.
        """
        outputs, inputs = self._fwd_outputs_for_bwd_meta, self._fwd_inputs_for_bwd_meta
        further = self._fwd_kwargs_tensors_for_bwd_meta or ()
        metas = self._stage_meta.inputs
        if outputs is None or inputs is None or metas is None:
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: infer the forward first; the gradients' metadata follows from it"
            )
        self._forget_dry_run()
        self._stage_meta.output_grads = self._following_gradients(loss_fn, target, received_grad_meta)
        input_grads = _derive_grad_metas(metas)
        if inputs:
            roots, gradients = self._inference_roots(outputs, loss_fn, target, loss_kwargs)
            if roots:
                found = self._compute_input_grads(roots, [*inputs, *further], gradients)[: len(inputs)]
                input_grads = tuple(
                    derived if gradient is None else extract_tensor_meta(gradient)
                    for gradient, derived in zip(found, input_grads, strict=True)
                )
        self._stage_meta.input_grads = input_grads
        for other in self._other_metas:
            other.input_grads = _like(input_grads, other.inputs)
            other.output_grads = _like(self._stage_meta.output_grads, other.outputs)
        meta = _StageBackwardMeta(input_grads)
        if self.is_first or self._is_same_rank(self.stage_index - 1):
            return meta
        self._send_meta(meta, self.stage_index - 1)
        return None

    def _following_gradients(
        self, loss_fn: object, target: object, received: _StageBackwardMeta | None
    ) -> tuple[TensorMeta | None, ...] | None:
        """Get the metadata of the gradients that the next stage sends; None for the last stage."""
        if self.is_last:
            if loss_fn is None or target is None:
                missing = "loss_fn" if loss_fn is None else "target"
                raise PipeliningMetadataError(
                    f"stage {self.stage_index} is the last, but has no {missing}; pass target= to step() on its rank"
                )
            return None
        meta = received if self._is_same_rank(self.stage_index + 1) else self._recv_meta(self.stage_index + 1)
        if not isinstance(meta, _StageBackwardMeta):
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: stage {self.stage_index + 1} sent {type(meta).__name__}, but the metadata "
                "of its input gradients is needed"
            )
        outputs = self._stage_meta.outputs or ()
        for index, (output, gradient) in enumerate(zip(outputs, meta.backward_metas, strict=True)):
            if gradient is not None and not output.requires_grad:
                raise PipeliningMetadataError(
                    f"stage {self.stage_index}: output {index} receives a gradient, but has requires_grad=False"
                )
        return meta.backward_metas

    def _inference_roots(
        self,
        outputs: tuple[torch.Tensor, ...],
        loss_fn: Callable[..., torch.Tensor] | None,
        target: torch.Tensor | None,
        loss_kwargs: dict[str, Any] | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None] | None]:
        """Find the roots of the dry run's backward, and their gradients."""
        if self.is_last:
            assert loss_fn is not None
            assert target is not None
            with torch.enable_grad():
                value = outputs[0] if len(outputs) == 1 else outputs
                return [loss_fn(value, copy_as_leaves(self._to_tensor(target)), **(loss_kwargs or {}))], None
        metas = self._stage_meta.output_grads or ()
        pairs = [pair for pair in zip(outputs, metas, strict=True) if pair[0].requires_grad]
        ones = [None if meta is None else self._ones_from_metadata(meta) for _, meta in pairs]
        return [output for output, _ in pairs], ones

    def _to_tensor(self, arg: torch.Tensor | TensorMeta) -> torch.Tensor:
        """Make a leaf with the values of a tensor, or any values where it is only described."""
        if isinstance(arg, torch.Tensor):
            return arg.detach().requires_grad_(arg.requires_grad)
        if isinstance(arg, _DTensorMeta):
            return arg.to_dtensor(self.device, self._mesh_cache.get_mesh(arg.mesh_cache_key))
        if isinstance(arg, TensorMeta):
            return arg.to_tensor(self.device)
        raise PipeliningMetadataError(
            f"stage {self.stage_index}: a {type(arg).__name__} cannot be converted to a tensor: {arg}"
        )

    def _ones_from_metadata(self, meta: TensorMeta) -> torch.Tensor:
        """Make ones that look like a gradient."""
        with torch.no_grad():
            return self._to_tensor(replace(meta, requires_grad=False)).fill_(1)

    def _forget_dry_run(self) -> None:
        self._fwd_outputs_for_bwd_meta = None
        self._fwd_inputs_for_bwd_meta = None
        self._fwd_kwargs_tensors_for_bwd_meta = None

    def _post_metadata_inference_cleanup(self) -> None:
        """Leave no trace of the run: neither its graph nor parameters that were gathered for it."""
        self._forget_dry_run()
        self._next_microbatches = ([], [])
        if self._parallel is not None:
            self._parallel.reshard()
            self._parallel.end_step()

    def _forget_failed_step(self) -> None:
        super()._forget_failed_step()
        self._forget_dry_run()
        self._next_microbatches = ([], [])

    def _validate_inferred_metadata(self) -> None:
        """Warn where examples were given that do not look like what was found."""
        pairs = (
            (self._user_meta.inputs, self._stage_meta.inputs, "input"),
            (self._user_meta.outputs, self._stage_meta.outputs, "output"),
            (self._user_meta.input_grads, self._stage_meta.input_grads, "input_grad"),
            (self._user_meta.output_grads, self._stage_meta.output_grads, "output_grad"),
        )
        for given, found, name in pairs:
            if given and found:
                what = f"Stage {self.stage_index} {name}"
                validate_tensors_metadata(what, given, found, warn_on_mismatch=True)


def with_gradients(metas: Sequence[TensorMeta] | None) -> tuple[TensorMeta, ...] | None:
    """Mark examples of what goes from stage to stage in training.

    If none of them requires a gradient, all that can have one do: a user who writes ``torch.empty(...)`` for an example
    thinks of shapes.
    """
    if metas is None or any(meta.requires_grad or isinstance(meta, _DTensorMeta) for meta in metas):
        return None if metas is None else tuple(metas)
    return tuple(replace(meta, requires_grad=is_differentiable(meta.dtype)) for meta in metas)


def _like(
    gradients: tuple[TensorMeta | None, ...] | None, tensors: tuple[TensorMeta, ...] | None
) -> tuple[TensorMeta | None, ...] | None:
    """Describe the gradients of another kind of microbatch: None where the first kind has none."""
    if gradients is None or tensors is None:
        return None
    derived = _derive_grad_metas(tuple(replace(one, requires_grad=True) for one in tensors))
    if any(one is not None and other is None for one, other in zip(gradients, derived, strict=True)):
        raise PipeliningMetadataError(
            "microbatches with DTensors differ in their shapes; make the batch a multiple of the number of microbatches"
        )
    return tuple(None if one is None else other for one, other in zip(gradients, derived, strict=True))
