"""What a stage knows and holds."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from penstock.execution.data_parallel import adapter_for
from penstock.graph.heap import keep_all_freed_memory
from penstock.pipelining._stage.group_channel import GroupChannel
from penstock.pipelining._utils import _MeshCache, _StageMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.execution.data_parallel.adapter import DataParallel
    from penstock.execution.shared_memory import Groups
    from penstock.pipelining._stage.transfers import _RecvInfo

logger = logging.getLogger("penstock.pipelining.stage")


class StageState:
    """The attributes of a stage, and what follows from them.

    Attributes:
        submod: the module that it runs.
        stage_index: which stage it is.
        num_stages: how many there are.
        device: where it runs.
        group: the ranks of the pipeline; None for all.
        group_rank: this rank in the group.
        group_size: how many ranks it has.
        dw_builder: called after a backward; returns what computes the gradients of the weights.
        backward_state: by microbatch, what is left between the two halves of a backward.
        dw_runner: by microbatch, the second half.
        fwd_cache: by microbatch, the outputs and the inputs of a forward; once sent, outputs are kept as edges of the
            autograd graph.
        bwd_cache: by microbatch, the gradients of the inputs.
        output_chunks: the outputs of the last stage; after ``step`` in the order of the microbatches.
        args_recv_info: by microbatch, the inputs.
        act_send_info: by output, the stages that it goes to.
        grad_recv_info: by microbatch, the gradients of the outputs.
        grad_send_info: by input, the stage that its gradient goes to.
        chunks: how many microbatches there are, once it is known.
        stage_index_to_group_rank: the rank of every stage.
    """

    submod: Any = None
    group: dist.ProcessGroup | None = None
    dw_builder: Callable[[], Callable[..., None]] | None = None
    chunks: int | None = None
    _runtime_validate = False
    _submodule: tuple[Any, type] = (None, type(None))
    _parallel_of_submodule: DataParallel | None = None
    _has_backward = False
    #: Whether, while this step runs, all computation is as written here, of a module that is not shared.
    _is_plain = False
    #: Whether, while this step runs, functions of the user may look at outputs that are on their way.
    _is_watched = False
    #: Whether the program has set its own buffers where inputs are received.
    _has_own_buffers = False
    #: Which inputs, and which outputs, share memory by what both sides know (see ``_stage/sharing``).
    _shared_inputs: Groups = ()
    _shared_outputs: Groups = ()
    #: Outputs that share memory and that the next stage cannot have modified, because they required a gradient there.
    _unmodified_outputs: Groups = ()
    #: Which kind each microbatch is of, if there are several: those of one kind have equal shapes.
    _kinds: tuple[int, ...] = ()
    #: What is known of kinds other than the first.
    _other_metas: tuple[_StageMeta, ...] = ()

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        super().__init__()
        if stage_index >= num_stages:
            raise ValueError(
                f"stage index {stage_index} is out of range: there are {num_stages} stages (0 to {num_stages - 1})"
            )
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self.group = group
        self.dw_builder = dw_builder
        self.group_rank = dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        if self.group_size > num_stages:
            raise RuntimeError(
                f"the pipeline group has {self.group_size} ranks but {num_stages} stages; each rank needs at least one"
            )
        self.log_prefix = f"[Stage {stage_index}]"
        self.has_backward = False
        self.chunks = None
        self.stage_index_to_group_rank = {stage: stage % self.group_size for stage in range(num_stages)}
        self._begin_empty()
        self._mesh_cache = _MeshCache()
        # For every tensor of every microbatch, which takes time: only when torch is asked for details.
        self._runtime_validate = get_debug_level() == DebugLevel.DETAIL
        if str(device).startswith("cpu"):
            keep_all_freed_memory()

    def _begin_empty(self) -> None:
        self.backward_state: dict[int, tuple[Any, ...]] = {}
        self.dw_runner: dict[int, Callable[..., None]] = {}
        self.fwd_cache: dict[int, tuple[Any, list[Any]]] = {}
        self.bwd_cache: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self.output_chunks: list[Any] = []
        self.args_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.act_send_info: dict[int, list[Any]] = {}
        self.grad_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.grad_send_info: list[int | None] | None = None

    # A subclass may not run the constructor: what is ours alone is made when it is needed.

    @cached_property
    def _by_keyword(self) -> dict[int, int]:
        """By microbatch, how many of the inputs in ``fwd_cache`` are arguments by keyword: the last ones."""
        return {}

    @cached_property
    def _output_microbatches(self) -> list[int]:
        """The microbatch of each of the ``output_chunks``."""
        return []

    @cached_property
    def _channel(self) -> GroupChannel:
        """What its messages go through, where they are sent by its methods."""
        return GroupChannel()

    @cached_property
    def _stage_meta(self) -> _StageMeta:
        """What goes in and comes out, as far as it is known."""
        return _StageMeta()

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed. A schedule with a loss function sets it."""
        return self._has_backward

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    @property
    def is_first(self) -> bool:
        """Whether it is the first stage of the pipeline."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the last stage of the pipeline."""
        return self.stage_index == self.num_stages - 1

    @property
    def _parallel(self) -> DataParallel | None:
        """What shares the parameters of the module with other replicas. The module may be replaced at any time."""
        submodule, kind = self._submodule
        if self.submod is not submodule or type(submodule) is not kind:  # fully_shard changes the type
            self._submodule = self.submod, type(self.submod)
            self._parallel_of_submodule = adapter_for(self.submod, reduce_in="last_backward")
        return self._parallel_of_submodule

    def _metas_of(self, microbatch: int) -> _StageMeta:
        """Describe the tensors of a microbatch."""
        kind = self._kinds[microbatch] if self._kinds else 0
        return self._other_metas[kind - 1] if kind else self._stage_meta

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise RuntimeError(
                f"{self.log_prefix} microbatch {chunk_id}: the number of microbatches (chunks) is not known yet"
            )
        if chunk_id >= self.chunks:
            raise RuntimeError(f"{self.log_prefix} microbatch {chunk_id} is out of range [0, {self.chunks})")

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """Find the rank, among all, that holds a stage."""
        group = self.group or dist.distributed_c10d._get_default_group()
        return dist.get_global_rank(group, self.stage_index_to_group_rank[stage_idx])
