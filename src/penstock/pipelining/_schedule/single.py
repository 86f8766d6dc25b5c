"""Schedules of one stage per rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.pipelining._engine.chains import program_of_gpipe, program_of_one_f_one_b
from penstock.pipelining._engine.methods import CallConvention
from penstock.pipelining._engine.step import Batch
from penstock.pipelining._schedule.base import _PipelineSchedule, logger
from penstock.pipelining._schedule.passes import _add_reduce_grad
from penstock.pipelining._schedule.rows import as_rows
from penstock.pipelining._schedule.upstream_names import upstream_names
from penstock.schedules.gpipe import gpipe
from penstock.schedules.one_f_one_b import one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from penstock.pipelining._engine.mode_selection import Mode
    from penstock.pipelining._engine.programs import Compiled
    from penstock.pipelining._engine.step import MethodStep
    from penstock.pipelining._schedule.rows import Rows
    from penstock.pipelining.microbatch import TensorChunkSpec
    from penstock.pipelining.stage import _PipelineStageBase

#: The programs of one stage per rank are made from no order.
_NO_ORDER: dict[int, list[Any]] = {0: []}


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule of one stage per rank. A class of your own says in ``_step_microbatches`` what a step does.

    Gradients are divided by the number of microbatches unless ``scale_grads=False``: right for a loss that is a mean.
    """

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads=scale_grads
        )
        self._stage = stage
        self._num_stages = stage.num_stages
        self._stage_forward_initialized = False
        self._stage_backward_initialized = False
        self.pipeline_order: Rows | None = self._get_pipeline_order()

    def _initialize_stage(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: dict[str, Any] | None = None
    ) -> None:
        self._stage_forward_initialized, self._stage_backward_initialized = self._initialize_pp_stages(
            [self._stage],
            args,
            kwargs,
            target,
            self._stage_forward_initialized,
            self._stage_backward_initialized,
            loss_kwargs=loss_kwargs,
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step on a whole batch; see ``_PipelineSchedule.step``."""
        stages = [self._stage]
        microbatches = self._begin_step(stages, args, kwargs, target, needs_autograd=True)
        with self._step_of(stages):
            self._step_microbatches(*microbatches, losses, return_outputs, loss_kwargs=loss_kwargs)
        return self._outputs_of(stages) if return_outputs else None

    def _get_pipeline_order(self) -> Rows | None:
        """Get the order for tools that show it; None if there is none."""
        return None

    def _program(self, make: Callable[[bool, Mode], Compiled], mode: Mode) -> Compiled:
        """Get the program that ``make`` compiles: for training or not, in this mode."""
        trains = self._has_backward
        return self._kept.program(
            _NO_ORDER, 0, [self._stage], self._n_microbatches, {}, trains, mode, lambda: make(trains, mode)
        )

    #: Whether messages are posted apart by the rank that they go to or come from.
    _posts_by_peer = False

    def _new_step(self, batch: Batch, arg_mbs: list[Any], kwarg_mbs: list[Any]) -> MethodStep:
        step = super()._new_step(batch, arg_mbs, kwarg_mbs)
        if self._posts_by_peer:
            step.post = _posted_by_peer
        return step

    def _log_failure(self, place: int) -> None:
        logger.error(
            "rank %s: %s of stage %s failed at step %s of its program",
            self._stage.group_rank,
            type(self).__name__,
            self._stage.stage_index,
            place,
        )


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """The forwards of all microbatches, and nothing else."""

    _posts_by_peer = True

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if target_mbs is not None or losses is not None:
            raise RuntimeError("a forward-only schedule computes no loss; pass neither target= nor losses=")
        calls = CallConvention(saves_outputs=False, computes_loss=False)
        program = partial(
            self._program,
            lambda _, mode: program_of_gpipe(
                self._stage, self._n_microbatches, calls=calls, trains=False, mode=mode, backwards=False
            ),
        )
        batch = Batch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)
        self._run_step(batch, [self._stage], program, self._initialize_stage)


class ScheduleGPipe(PipelineScheduleSingle):
    """GPipe: the forwards of all microbatches, then the backwards."""

    _posts_by_peer = True

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        calls = CallConvention(passes_full_backward=False)
        program = partial(
            self._program,
            lambda trains, mode: program_of_gpipe(
                self._stage, self._n_microbatches, calls=calls, trains=trains, mode=mode
            ),
        )
        batch = Batch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)
        self._run_step(batch, [self._stage], program, self._initialize_stage)

    def _get_pipeline_order(self) -> Rows | None:
        rows = as_rows(gpipe(self._num_stages, self._n_microbatches))
        return {rank: [*_add_reduce_grad(row, self._n_microbatches)] for rank, row in rows.items()}


class Schedule1F1B(PipelineScheduleSingle):
    """1F1B: fill the pipeline, alternate one backward with one forward, drain."""

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        )
        if n_microbatches < self._num_stages:
            raise ValueError(
                f"1F1B needs at least as many microbatches as stages: {n_microbatches} < {self._num_stages}"
            )

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        calls = CallConvention(passes_full_backward=False)
        program = partial(
            self._program,
            lambda trains, mode: program_of_one_f_one_b(
                self._stage, self._num_stages, self._n_microbatches, calls=calls, trains=trains, mode=mode
            ),
        )
        batch = Batch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)
        self._run_step(batch, [self._stage], program, self._initialize_stage)

    def _get_pipeline_order(self) -> Rows | None:
        rows = as_rows(one_f_one_b(self._num_stages, self._n_microbatches))
        return {rank: [*_add_reduce_grad(row, self._n_microbatches)] for rank, row in rows.items()}


def _posted_by_peer(messages: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    return [work for works in upstream_names()._sorted_batch_p2p(messages, desc=desc).values() for work in works]
