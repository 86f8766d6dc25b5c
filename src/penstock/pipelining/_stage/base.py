"""What all kinds of stages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.pipelining._stage.compute import StageCompute

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipelining._stage.transfers import _RecvInfo
    from penstock.pipelining._utils import _StageBackwardMeta, _StageForwardMeta


class _PipelineStageBase(StageCompute, ABC):
    """A stage of a pipeline: a module, and its place among the stages.

    Args:
        submodule: what it runs.
        stage_index: which stage it is, from 0 on.
        num_stages: how many stages the pipeline has.
        device: where it runs.
        group: the ranks of the pipeline; all of them by default.
        dw_builder: for a module that computes the gradients of its weights itself. Called after each backward, it
            returns what computes them.
    """

    @abstractmethod
    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...] | _StageForwardMeta | None,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> _StageForwardMeta | None:
        """Find out what comes in and goes out, before the first forward."""
        raise NotImplementedError

    @abstractmethod
    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: torch.Tensor | None = None,
        received_grad_meta: _StageBackwardMeta | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> _StageBackwardMeta | None:
        """Find out which gradients come in and go out, before the first backward."""
        raise NotImplementedError

    @abstractmethod
    def _create_grad_recv_info(self, act_send_info: dict[int, list[Any]]) -> tuple[_RecvInfo, ...]:
        """Describe the gradients of the outputs of a microbatch."""
        raise NotImplementedError

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for microbatch in range(num_microbatches):
            self.grad_recv_info[microbatch] = self._create_grad_recv_info(self.act_send_info)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Operations with both neighbours in both directions, by which connections come up."""
        received = torch.zeros(1, device=self.device, dtype=torch.float32)
        sent = torch.tensor(self.stage_index, device=self.device, dtype=torch.float32)
        before = self.stage_index_to_group_rank.get(self.stage_index - 1)
        after = self.stage_index_to_group_rank.get(self.stage_index + 1)

        def operation(op: Any, tensor: torch.Tensor, peer: int | None) -> dist.P2POp:
            return dist.P2POp(op, tensor, group_peer=peer, group=self.group)

        ops = []
        if not self.is_first:
            ops.append(operation(dist.irecv, received, before))
        if not self.is_last:
            ops.append(operation(dist.isend, sent, after))
        if not self.is_first:
            ops.append(operation(dist.isend, sent, before))
        if not self.is_last:
            ops.append(operation(dist.irecv, received, after))
        return ops
