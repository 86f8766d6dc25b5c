"""Stages: a module each, and how it gets its inputs and gives its outputs.

::

    stage = PipelineStage(module, stage_index, num_stages, device)
    schedule = Schedule1F1B(stage, n_microbatches, loss_fn=loss_fn)
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist  # noqa: TC002 - a test of a program that has stages may patch what is in it

from penstock.pipelining._backward import (
    _autograd_grad_for_inputs,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from penstock.pipelining._debug import map_debug_info
from penstock.pipelining._stage.base import _PipelineStageBase
from penstock.pipelining._stage.inference import StageInference, with_gradients
from penstock.pipelining._stage.sharing import find_shared
from penstock.pipelining._stage.traced import _PipelineStage, build_stage
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple, _RecvInfo
from penstock.pipelining._utils import (
    GetMeshCallback,
    InferenceMode,
    PipeInfo,
    PipeliningMetadataError,
    TensorMeta,
    _derive_grad_metas,
    _DTensorMeta,
    _make_tensor_from_meta,
    _MeshCache,
    _StageBackwardMeta,
    _StageForwardMeta,
    _StageMeta,
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    flatten_args,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
    validate_static_arg_grad_correspondence,
    validate_tensors_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from penstock.execution.shared_memory import Groups

# Programs with stages of their own take from here what these are made of, too.
__all__ = [
    "PipeInfo",
    "PipelineStage",
    "_DTensorMeta",
    "_PipelineStage",
    "_PipelineStageBase",
    "_RecvInfo",
    "_StageBackwardMeta",
    "_StageForwardMeta",
    "_TensorMeta",
    "_autograd_grad_for_inputs",
    "_make_tensor_from_meta",
    "_normalize_model_output_as_tuple",
    "build_stage",
    "extract_tensor_meta",
    "flatten_args",
    "map_debug_info",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "to_local_if_dtensor",
    "validate_tensors_metadata",
]

logger = logging.getLogger(__name__)


class PipelineStage(StageInference):
    """A stage that the user has cut out of a model.

    What goes in and comes out of it for a microbatch can be given by examples; if any stage has too few, all are run
    once before the first step, and examples are compared with what is found.

    Args:
        submodule: what it runs.
        stage_index: which stage it is, from 0 on.
        num_stages: how many stages the pipeline has.
        device: where it runs.
        input_args: examples of its inputs: a tensor or several.
        output_args: examples of its outputs.
        output_grads: examples of the gradients of its outputs, needed for DTensors; None for one without.
        input_grads: examples of the gradients of its inputs.
        group: the ranks of the pipeline; all of them by default.
        dw_builder: for a module that computes the gradients of its weights itself. Called after each backward, it
            returns what computes them.
        get_mesh: finds the mesh of a DTensor that comes from another stage.
    """

    #: Which of the examples share memory: inputs, and outputs.
    _shared_examples: tuple[Groups, Groups] = (), ()

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        input_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: GetMeshCallback | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self._mesh_cache = _MeshCache(get_mesh_cb=get_mesh)
        self._inference_mode: InferenceMode | None = None
        self._forget_dry_run()
        inputs = validate_and_normalize_to_tuple(input_args)
        outputs = validate_and_normalize_to_tuple(output_args)
        gradients_in = validate_and_normalize_to_tuple(input_grads, allow_none=True)
        gradients_out = validate_and_normalize_to_tuple(output_grads, allow_none=True)
        self._user_meta = _StageMeta(
            extract_tensor_metas(inputs),
            extract_tensor_metas(outputs),
            extract_tensor_metas(gradients_in, allow_none=True),
            extract_tensor_metas(gradients_out, allow_none=True),
        )
        self._shared_examples = find_shared(inputs or ()), find_shared(outputs or ())
        for examples in (inputs, outputs, gradients_in, gradients_out):
            self._mesh_cache.update_from_tensors(examples or ())
        if self._user_meta.has_dtensors():
            if inputs and gradients_in:
                validate_static_arg_grad_correspondence(stage_index, inputs, gradients_in, is_input=True)
            if outputs and gradients_out:
                validate_static_arg_grad_correspondence(stage_index, outputs, gradients_out, is_input=False)

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...] | _StageForwardMeta | None,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> _StageForwardMeta | None:
        if self._inference_mode is None:
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: the stages have not voted yet on whether to infer metadata "
                "(_inference_mode is None)"
            )
        meta = None
        if self._inference_mode.value == InferenceMode.STATIC.value:
            examples = self._user_meta
            self._kinds = self._other_metas = ()
            self._shared_inputs, self._shared_outputs = self._shared_examples
            trained = has_backward and not self.is_first
            self._stage_meta.inputs = with_gradients(examples.inputs) if trained else examples.inputs
            trained = has_backward and not self.is_last
            self._stage_meta.outputs = with_gradients(examples.outputs) if trained else examples.outputs
        else:
            meta = self._forward_metadata_inference(args, kwargs, has_backward)
            self._validate_inferred_metadata()
        self._setup_forward_recv_info(num_microbatches, has_backward)
        self._setup_forward_send_info()
        return meta

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: torch.Tensor | None = None,
        received_grad_meta: _StageBackwardMeta | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> _StageBackwardMeta | None:
        meta = None
        # By value: a schedule may have the mode from elsewhere.
        if self._inference_mode is not None and self._inference_mode.value == InferenceMode.DYNAMIC.value:
            meta = self._backward_metadata_inference(loss_fn, target, received_grad_meta, loss_kwargs)
            self._validate_inferred_metadata()
        else:
            metas, examples = self._stage_meta, self._user_meta
            metas.output_grads = _given_or_derived(examples.output_grads, metas.outputs, self.stage_index, "outputs")
            metas.input_grads = _given_or_derived(examples.input_grads, metas.inputs, self.stage_index, "inputs")
        self._setup_backward_recv_info(num_microbatches)
        return meta

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:  # noqa: ARG002
        before = self.stage_index - 1
        for microbatch in range(num_microbatches):
            metas = self._metas_of(microbatch).inputs
            if metas is None:
                raise PipeliningMetadataError(f"stage {self.stage_index}: its inputs are not known yet")
            if self.is_first:
                self.args_recv_info[microbatch] = tuple(
                    _RecvInfo(f"root_input_{index}", None, None, meta, is_root_arg=True)
                    for index, meta in enumerate(metas)
                )
            else:
                self.args_recv_info[microbatch] = tuple(
                    _RecvInfo(f"recv_for_{self.stage_index}_from_{before}", before, None, meta) for meta in metas
                )

    def _setup_forward_send_info(self) -> None:
        metas = self._stage_meta.outputs
        if metas is None:
            raise PipeliningMetadataError(f"stage {self.stage_index}: its outputs are not known yet")
        following = [] if self.is_last else [self.stage_index + 1]
        self.act_send_info = {index: list(following) for index in range(len(metas))}

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for microbatch, kind in enumerate(self._kinds):
            if kind and not self.is_last:
                metas = self._metas_of(microbatch).output_grads or ()
                infos = self.grad_recv_info[microbatch]
                self.grad_recv_info[microbatch] = tuple(
                    _RecvInfo(info.input_name, info.source, None, meta) for info, meta in zip(infos, metas, strict=True)
                )

    def _create_grad_recv_info(self, act_send_info: dict[int, list[Any]]) -> tuple[_RecvInfo, ...]:
        if self.is_last:
            return ()
        metas = self._stage_meta.output_grads
        if metas is None:
            raise PipeliningMetadataError(f"stage {self.stage_index}: the gradients of its outputs are not known yet")
        infos = []
        for index, stages in act_send_info.items():
            if not stages:
                raise PipeliningMetadataError(f"stage {self.stage_index}: output {index} is not sent to any stage")
            name = f"recv_grad_for_{self.stage_index}_from_{stages[0]}"
            infos.append(_RecvInfo(name, stages[0], None, metas[index]))
        return tuple(infos)


def _given_or_derived(
    given: tuple[TensorMeta | None, ...] | None, tensors: tuple[TensorMeta, ...] | None, stage: int, what: str
) -> tuple[TensorMeta | None, ...]:
    """What gradients look like: as the examples, or as their tensors."""
    if given is not None:
        return given
    if tensors is None:
        raise PipeliningMetadataError(f"stage {stage}: its {what} are not known yet, and gradients follow from them")
    return _derive_grad_metas(tensors)
