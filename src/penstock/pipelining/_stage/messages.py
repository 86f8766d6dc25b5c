"""Sends and receives activations and gradients, by operations to post or at once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.execution.autograd import gradient_edge
from penstock.execution.value_spec import as_wire
from penstock.pipelining._stage.received import StageReceived
from penstock.pipelining._stage.sharing import check_announced, find_shared, kin_among, merge_groups
from penstock.pipelining._stage.transfers import (
    _RecvInfo,
    spec_of,
    to_wire,
)
from penstock.pipelining._utils import (
    PipeliningMetadataError,
    TensorMeta,
    _derive_grad_metas,
    to_local_if_dtensor,
)

if TYPE_CHECKING:
    from penstock.pipelining._stage.group_channel import GroupChannel


class StageMessages(StageReceived):
    """A stage and its neighbours.

    A receive gets its buffer when it is asked for, and the buffer is the stage's input: it is free when the microbatch
    is. So there are as many as are in flight or on their way, however many microbatches there are.
    """

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        """Make an operation for everything that comes from another stage."""
        return [self._operation(dist.irecv, memory, source) for memory, source in self._receive_buffers(recv_infos)]

    def _operation(self, op: Any, tensor: torch.Tensor, stage: Any) -> dist.P2POp:
        return dist.P2POp(op, tensor, self._resolve_peer_global_rank(stage), self.group)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make the operations that receive the inputs of a microbatch."""
        return self._get_recv_ops(self.args_recv_info[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make the operations that receive the gradients of a microbatch's outputs."""
        if not self.has_backward or self.is_last:
            return []
        return self._get_recv_ops(self.grad_recv_info[bwd_chunk_id])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make the operations that send the outputs of a microbatch."""
        return [self._operation(dist.isend, tensor, stage) for tensor, stage in self._outgoing_tensors(fwd_chunk_id)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make the operations that send the gradients of a microbatch's inputs."""
        return [self._operation(dist.isend, tensor, stage) for tensor, stage in self._outgoing_gradients(bwd_chunk_id)]

    # The same without operations, for messages that begin at once -----------------------------------------------------

    def _receive_inputs(self, microbatch: int) -> list[dist.Work]:
        return self._receive(self.args_recv_info[microbatch])

    def _receive_gradients(self, microbatch: int) -> list[dist.Work]:
        if not self.has_backward or self.is_last:
            return []
        return self._receive(self.grad_recv_info[microbatch])

    def _send_outputs(self, microbatch: int) -> list[dist.Work]:
        return self._send(self._outgoing_tensors(microbatch))

    def _send_gradients(self, microbatch: int) -> list[dist.Work]:
        return self._send(self._outgoing_gradients(microbatch))

    def _send(self, outgoing: list[tuple[torch.Tensor, int]]) -> list[dist.Work]:
        rank_of = self.stage_index_to_group_rank
        return [self._open_channel().send(tensor, rank_of[stage]) for tensor, stage in outgoing]

    def _receive(self, infos: tuple[_RecvInfo, ...]) -> list[dist.Work]:
        rank_of, coming = self.stage_index_to_group_rank, self._receive_buffers(infos)
        return [self._open_channel().receive(memory, rank_of[source]) for memory, source in coming]

    def _open_channel(self) -> GroupChannel:
        if not self._channel.is_open:
            self._channel.open(self)
        return self._channel

    # What goes where --------------------------------------------------------------------------------------------------

    def _receive_buffers(self, infos: tuple[_RecvInfo, ...]) -> list[tuple[torch.Tensor, Any]]:
        """Find memory for everything that comes from another stage, and the stage."""
        coming = []
        for info in infos:
            if info.is_root_arg:
                continue
            if info.buffer is not None:
                coming.append((as_wire(info.buffer), info.source))
            elif info.tensor_meta is not None:
                # In inference mode, changes of a new tensor would not be counted.
                with torch.inference_mode(False) if self._shared_inputs else nullcontext():
                    coming.append((info.allocate(self.device), info.source))
        return coming

    def _outgoing_tensors(self, microbatch: int) -> list[tuple[torch.Tensor, int]]:
        """List the outputs of a microbatch as they go over the wire, and the stages that they go to."""
        if self.is_last and microbatch not in self.fwd_cache:
            return []
        outputs, inputs = self.fwd_cache[microbatch]
        metas = self._metas_of(microbatch).outputs
        are_known = metas is not None and len(metas) == len(outputs)
        if len(outputs) > 1:
            self._check_sharing(microbatch, outputs, inputs)
        going = []
        for index, output in enumerate(outputs):
            for stage in self.act_send_info[index]:
                if stage is None:
                    continue
                # It has no history, or the operation would keep all of it.
                tensor = to_local_if_dtensor(output, detach=True)
                meta = metas[index] if are_known and metas is not None else None
                what = f"stage {self.stage_index} microbatch {microbatch} output {index}"
                sent = tensor.contiguous() if meta is None else to_wire(tensor, spec_of(meta), what)
                going.append((sent, stage))
        if going:
            self._release_outputs(microbatch, outputs, inputs)
        return going

    def _check_sharing(self, microbatch: int, outputs: tuple[Any, ...], inputs: list[Any]) -> None:
        """Refuse outputs that share memory if the next stage could modify them in place, unknowingly."""
        found = find_shared(outputs, kin_among(inputs, self._shared_inputs))
        if not found:
            return
        metas = self._metas_of(microbatch).outputs
        if self._has_backward and metas is not None:
            # There they are leaves that require a gradient, which autograd does not let it modify.
            leaves = {index for index, meta in enumerate(metas) if meta.requires_grad}
            safe = tuple(group for group in found if leaves.issuperset(group))
            self._unmodified_outputs = merge_groups([self._unmodified_outputs, safe])
        announced = (*self._shared_outputs, *self._unmodified_outputs)
        check_announced(found, announced, self.stage_index, microbatch)

    def _release_outputs(self, microbatch: int, outputs: tuple[Any, ...], inputs: list[Any]) -> None:
        """Keep of outputs that are on their way only where the backward begins, so that their memory can be freed."""
        if not self._has_backward:
            if not torch.is_grad_enabled():
                del self.fwd_cache[microbatch]
        elif self._is_plain or not (self._is_watched or self._are_outputs_used() or self._has_own_backward()):
            self.fwd_cache[microbatch] = tuple([as_root(output) for output in outputs]), inputs

    def _are_outputs_used(self) -> bool:
        """Whether what reduces gradients looks at outputs in the backward."""
        return self._parallel is not None and self._parallel.keeps_outputs

    def _has_own_backward(self) -> bool:
        """Whether backwards run in another way than here, which may look at outputs that are on their way."""
        return False

    def _outgoing_gradients(self, microbatch: int) -> list[tuple[torch.Tensor, int]]:
        """List the gradients of a microbatch's inputs as they go over the wire, and the stages that they go to."""
        return [(tensor, stage) for _, tensor, stage in self._gradients_of_inputs(microbatch)]

    def _gradients_of_inputs(self, microbatch: int) -> list[tuple[int, torch.Tensor, int]]:
        """List which inputs have gradients to send, these as they go over the wire, and the stages."""
        if not self.has_backward or self.is_first:
            return []
        self._check_chunk_id(microbatch)
        if self.grad_send_info is None:
            self.grad_send_info = self._create_grad_send_info(self.args_recv_info[0])
        gradients = self.bwd_cache.pop(microbatch)
        going = []
        for index, (gradient, stage) in enumerate(zip(gradients, self.grad_send_info, strict=True)):
            if stage is None:
                if gradient is not None:
                    raise PipeliningMetadataError(
                        f"stage {self.stage_index} microbatch {microbatch}: input {index} has a gradient, "
                        "but there is no stage to send it to"
                    )
                continue
            tensor = self._sendable_gradient(gradient, index, microbatch)
            if tensor is not None:
                going.append((index, tensor, stage))
        return going

    def _sendable_gradient(self, gradient: torch.Tensor | None, index: int, microbatch: int) -> torch.Tensor | None:
        """Get what goes over the wire: zeros for an input that nothing depends on; None if nothing is waited for."""
        meta = self._gradient_meta(index, microbatch)
        if meta is None:
            if gradient is None:
                return None
            raise PipeliningMetadataError(
                f"stage {self.stage_index} microbatch {microbatch}: input {index} has a gradient, but none was agreed, "
                "so the previous stage does not wait for it. DTensor grad metadata cannot be derived from that of the "
                "activation, because the gradient may have other placements; pass input_grads and output_grads, or "
                "make a microbatch with this gradient the first"
            )
        if gradient is None:
            return as_wire(spec_of(meta).empty(self.device).zero_())
        what = f"stage {self.stage_index} microbatch {microbatch} gradient of input {index}"
        return to_wire(to_local_if_dtensor(gradient), spec_of(meta), what)

    def _gradient_meta(self, index: int, microbatch: int) -> TensorMeta | None:
        metas = self._metas_of(microbatch).input_grads
        return self._get_grad_send_meta(index) if metas is None or index >= len(metas) else metas[index]

    def _get_grad_send_meta(self, input_idx: int) -> TensorMeta | None:
        """Describe the gradient of an input; None if it has none."""
        gradients, inputs = self._stage_meta.input_grads, self._stage_meta.inputs
        if gradients is not None and input_idx < len(gradients):
            return gradients[input_idx]
        if inputs is not None and input_idx < len(inputs):
            return _derive_grad_metas((inputs[input_idx],))[0]
        raise PipeliningMetadataError(
            f"stage {self.stage_index}: input {input_idx} has a gradient to send, but no metadata for it"
        )

    def _create_grad_send_info(self, args_recv_info: tuple[_RecvInfo, ...]) -> list[int | None]:
        """For every input the stage that its gradient goes to: where the input has come from."""
        return [None if info.is_root_arg else info.source for info in args_recv_info]

    def clear_runtime_states(self) -> None:
        """Begin a step: forget the one before."""
        self.fwd_cache.clear()
        self._by_keyword.clear()
        self.output_chunks.clear()
        self._output_microbatches.clear()
        for name in ("bwd_cache", "backward_state", "dw_runner"):  # which a stand-in may not have
            getattr(self, name, {}).clear()
        self._channel.close()
        self._has_own_buffers = False
        for infos in (*self.args_recv_info.values(), *getattr(self, "grad_recv_info", {}).values()):
            for info in infos:
                info.forget()
                if info.buffer is not None and not info.is_root_arg:
                    info.buffer.grad = None
                    self._has_own_buffers = True


def as_root(output: Any) -> Any:
    """Find where the backward of an output begins, without the output; None if it has none; a leaf itself."""
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        return None
    return output if output.grad_fn is None else gradient_edge(output)
