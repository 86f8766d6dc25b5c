"""The schedules of several stages per rank that have a name: an order each, lowered when the schedule is made."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from penstock.pipelining._schedule.orders import dual_pipe_v_row, interleaved_row, looped_bfs_row, with_bubbles, zbv_row
from penstock.pipelining._schedule.runtime import _PipelineScheduleRuntime
from penstock.pipelining._utils import generate_stage_to_rank_mapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipelining._schedule.rows import Row, Rows
    from penstock.pipelining.microbatch import TensorChunkSpec
    from penstock.pipelining.stage import _PipelineStageBase


class ScheduleLoopedBFS(_PipelineScheduleRuntime):
    """Breadth-first: every stage of a rank runs all microbatches before the next stage does."""

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        super().__init__(
            stages=stages,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return looped_bfs_row(rank, self.pp_group_size, len(self._stages), self._n_microbatches)


class _NamedSchedule(_PipelineScheduleRuntime):
    """What the other classes share: their arguments, and when the order is made."""

    #: Whether its order splits backwards.
    _splits_backward = True

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        if self._splits_backward:
            _check_torch_compile_compatibility(stages, type(self).__name__)
        super().__init__(
            stages=stages,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )
        self.n_local_stages = len(stages)
        self._check_size()
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        self._finish_order()
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _check_size(self) -> None:
        """Refuse sizes that there is no order for; place the stages."""
        raise NotImplementedError

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        raise NotImplementedError

    def _finish_order(self) -> None:
        """Change the order once that of all ranks is there."""


class ScheduleInterleaved1F1B(_NamedSchedule):
    """1F1B with several stages per rank, which takes the earlier microbatch first.

    The number of microbatches has to be a multiple of ``max(1, microbatches // ranks)``: e.g. 10 or 3 on 4 ranks.
    """

    _splits_backward = False

    def _check_size(self) -> None:
        _check_rounds(self, "Interleaved 1F1B")

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return _interleaved_row(self, rank, zero_bubble=False)


class ScheduleInterleavedZeroBubble(_NamedSchedule):
    """Interleaved 1F1B with split backwards: weight gradients fill the bubbles."""

    def _check_size(self) -> None:
        _check_rounds(self, "Zero bubble")

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return _interleaved_row(self, rank, zero_bubble=True)

    def _finish_order(self) -> None:
        self.pipeline_order = self._add_bubbles_to_actions(self.n_local_stages * self.pp_group_size)

    def _add_bubbles_to_actions(self, num_stages_global: int) -> Rows:  # noqa: ARG002  # upstream has it
        """Add idle steps to an order where a rank waits for a forward."""
        return with_bubbles(self.pipeline_order)


def _check_rounds(schedule: Any, name: str) -> None:
    """Microbatches go through the stages of a rank in rounds of one size."""
    microbatches = schedule._n_microbatches
    schedule.number_of_rounds = max(1, microbatches // schedule.pp_group_size)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    if microbatches % schedule.number_of_rounds != 0:
        raise ValueError(
            f"{name} needs a number of microbatches that is a multiple of {schedule.number_of_rounds} rounds, not "
            f"{microbatches}"
        )


def _interleaved_row(schedule: Any, rank: int, *, zero_bubble: bool) -> Row:
    return interleaved_row(
        rank,
        schedule.pp_group_size,
        schedule.n_local_stages,
        schedule._n_microbatches,
        schedule.microbatches_per_round,
        zero_bubble=zero_bubble,
    )


class ScheduleZBVZeroBubble(_NamedSchedule):
    """Zero bubble in a V: two stages per rank, split backwards. No bubbles if F, I and W take the same time."""

    def _check_size(self) -> None:
        _check_v(self, "ZBV")

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return zbv_row(rank, self.pp_group_size, self._n_microbatches)


class ScheduleDualPipeV(_NamedSchedule):
    """A V in which forwards overlap with backwards, as in DeepSeek's DualPipe."""

    def _check_size(self) -> None:
        _check_v(self, "DualPipeV")
        if self._n_microbatches < self._num_stages:
            raise ValueError(
                f"DualPipeV needs at least as many microbatches as stages: {self._n_microbatches} < {self._num_stages}"
            )

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return dual_pipe_v_row(rank, self.pp_group_size, self._n_microbatches)


def _check_v(schedule: Any, name: str) -> None:
    """Two stages per rank, down the ranks and up again."""
    ranks, stages = schedule.pp_group_size, schedule._num_stages
    schedule._place_stages(generate_stage_to_rank_mapping(ranks, stages, style="v"))
    schedule.num_stages = stages
    if schedule.n_local_stages != 2:
        raise ValueError(f"{name} needs exactly 2 stages per rank, not {schedule.n_local_stages}")


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    """Refuse compiled modules: their backward is one piece, and cannot be split.

    Raises:
        RuntimeError: a stage has one.
    """
    compiling = sys.modules.get("torch._dynamo.eval_frame")
    if compiling is None:  # then nothing can be compiled yet
        return
    modules: list[Any] = [stage.submod for stage in stages]
    for module in modules:
        parts = module.modules() if isinstance(module, torch.nn.Module) else ()
        if any(isinstance(part, compiling.OptimizedModule) for part in parts):
            raise RuntimeError(
                f"{schedule_name} splits backwards, which is not possible for a module under torch.compile; compile "
                "functions within the module instead, or use a schedule with full backwards"
            )
