"""Gets what a stage has received: from another rank, or handed over by a stage on the same one."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate

from penstock.pipelining._stage.state import StageState
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple, _RecvInfo
from penstock.pipelining._utils import PipeliningMetadataError, _DTensorMeta, to_local_if_dtensor


class StageReceived(StageState):
    """A stage that takes what others leave for it."""

    #: Whether a stage other than the first may be passed arguments of the model, by keyword.
    _takes_model_arguments = False

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the outputs of the stage before, which is on the same rank, as the inputs of a microbatch."""
        outputs = _normalize_model_output_as_tuple(prev_stage_outputs)
        for info, tensor in zip(self.args_recv_info[mb_index], outputs, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise AssertionError(
                    f"stage {self.stage_index} microbatch {mb_index}: the previous stage returned a "
                    f"{type(tensor).__name__}, but a tensor is needed"
                )
            if info.is_root_arg:
                raise AssertionError(
                    f"stage {self.stage_index} is the first, so it has no previous stage to get inputs from"
                )
            info.put(to_local_if_dtensor(tensor, detach=True))

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Get the gradients of a microbatch's inputs, for the stage before, which is on the same rank."""
        if not self.has_backward:
            raise AssertionError(f"stage {self.stage_index} has no backward, so it has no input gradients")
        if self.is_first:
            raise AssertionError(
                f"stage {self.stage_index} is the first, so it has no previous stage to pass gradients to"
            )
        self._check_chunk_id(mb_index)
        return self.bwd_cache.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take gradients from the next stage, which is on the same rank, as those of a microbatch's outputs."""
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"expected a tuple of gradients, got a {type(next_stage_bwd_outputs).__name__}")
        if not self.has_backward:
            raise AssertionError(f"stage {self.stage_index} has no backward, so it does not take output gradients")
        if self.is_last:
            raise AssertionError(f"stage {self.stage_index} is the last, so it has no next stage to get gradients from")
        for info, tensor in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if tensor is None:
                if info.tensor_meta is not None or info.buffer is not None:
                    _zero(info, self.device)
                continue
            if not isinstance(tensor, torch.Tensor):
                raise AssertionError(f"the next stage returned a {type(tensor).__name__}, but a gradient is needed")
            if info.is_root_arg:
                raise AssertionError(f"stage {self.stage_index}: {info.input_name} is not a received gradient")
            info.put(to_local_if_dtensor(tensor))

    def _map_tensor_from_recv_info(self, recv_infos: tuple[_RecvInfo, ...]) -> Any:
        """Get the buffers of inputs."""

        def buffer_of(info: Any) -> Any:
            if info.is_root_arg:
                raise PipeliningMetadataError(f"{info.input_name} is an argument of the model, which is not received")
            return info.buffer

        return map_aggregate(cast("Any", recv_infos), buffer_of)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        """Get the inputs of a microbatch, as leaves of its graph."""
        needs_gradients = self.has_backward and torch.is_grad_enabled()
        activations = []
        for info in self.args_recv_info[fwd_chunk_id]:
            if info.is_root_arg:
                if self._takes_model_arguments:
                    continue
                raise PipeliningMetadataError(f"{info.input_name} is an argument of the model, which is not received")
            buffer, meta = info.buffer, info.tensor_meta
            if buffer is None or meta is None:
                missing = "buffer" if buffer is None else "metadata"
                raise PipeliningMetadataError(
                    f"stage {self.stage_index} microbatch {fwd_chunk_id}: no {missing} for input {info.input_name}; "
                    "was it received?"
                )
            if isinstance(meta, _DTensorMeta):
                buffer = self._distributed(buffer, meta, info)
            activation = buffer.requires_grad_(meta.requires_grad and needs_gradients)
            if activation.requires_grad and not activation.is_leaf:
                warnings.warn(
                    f"stage {self.stage_index}: input {info.input_name} is not a leaf (grad_fn={activation.grad_fn}); "
                    "its gradient is kept beside it",
                    stacklevel=2,
                )
                activation.retain_grad()
            activations.append(activation)
            info.forget()
        return tuple(activations)

    def _distributed(self, local: torch.Tensor, meta: _DTensorMeta, info: _RecvInfo) -> torch.Tensor:
        """Make a distributed tensor again, from the part of it that was received."""
        if local.requires_grad:
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: what was received for {info.input_name} requires a gradient before it is "
                "a DTensor"
            )
        mesh = self._mesh_cache.get_mesh(meta.mesh_cache_key)
        distributed: torch.Tensor = DTensor.from_local(
            local, mesh, meta.placements, run_check=False, shape=meta.global_shape, stride=meta.global_stride
        )
        return distributed

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        """Get the gradients of a microbatch's outputs; None for one that has none."""
        gradients: list[torch.Tensor | None] = []
        for info in self.grad_recv_info[bwd_chunk_id]:
            buffer, meta = info.buffer, info.tensor_meta
            if info.is_root_arg:
                raise PipeliningMetadataError(f"stage {self.stage_index}: {info.input_name} is not a gradient")
            if (buffer is None) != (meta is None):
                missing = "buffer" if buffer is None else "metadata"
                raise PipeliningMetadataError(
                    f"stage {self.stage_index} microbatch {bwd_chunk_id}: no {missing} for gradient {info.input_name}; "
                    "was it received?"
                )
            if buffer is not None and isinstance(meta, _DTensorMeta):
                buffer = self._distributed(buffer, meta, info)
            gradients.append(buffer)
            info.forget()
        return tuple(gradients)


def _zero(info: _RecvInfo, device: torch.device) -> None:
    if info.buffer is None:
        info.allocate(device)
    info.buffer.zero_()  # type: ignore[union-attr]
