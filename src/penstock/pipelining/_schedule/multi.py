"""Schedules of several stages per rank that run a compute-only order."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.pipelining._engine.links import edges_of
from penstock.pipelining._engine.methods import CallConvention
from penstock.pipelining._engine.programs import program_of_order
from penstock.pipelining._engine.step import Batch
from penstock.pipelining._schedule.actions import _Action
from penstock.pipelining._schedule.base import _PipelineSchedule, logger
from penstock.pipelining._schedule.passes import OrderError, compute_rows_with_transfers
from penstock.pipelining._schedule.text import _format_pipeline_order
from penstock.pipelining._schedule.validation import _validate_schedule
from penstock.pipelining._utils import generate_stage_to_rank_mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.pipelining._engine.mode_selection import Mode
    from penstock.pipelining._engine.programs import Compiled
    from penstock.pipelining._schedule.rows import Rows
    from penstock.pipelining.microbatch import TensorChunkSpec
    from penstock.pipelining.stage import _PipelineStageBase


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule of several stages per rank, which runs the compute-only order in ``pipeline_order``.

    A class of your own fills ``pipeline_order`` in its constructor, and calls ``_validate_and_set_stage_mapping`` if
    its stages are not placed in a loop. Idle steps in the order have no meaning for the run.

    Gradients are divided by the number of microbatches unless ``scale_grads=False``: right for a loss that is a mean.

    Attributes:
        pipeline_order: for each rank what it computes.
        stage_index_to_group_rank: the rank of each stage.
        pp_group_size: how many ranks there are.
        rank: this one.
    """

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
    ) -> None:
        super().__init__(
            n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads=scale_grads
        )
        if not hasattr(stages, "__getitem__"):
            raise TypeError(f"stages must be a list of the stages of this rank but got a {type(stages)}; write [stage]")
        self._stages = stages
        self._num_stages = stages[0].num_stages
        self.pp_group_size = stages[0].group_size
        self.rank = stages[0].group_rank
        self._place_stages(generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages))
        self._stages_forward_initialized = False
        self._stages_backward_initialized = False
        has_loss = loss_fn is not None
        self._should_compute_loss = lambda stage: stage.is_last and has_loss
        self.pipeline_order: Rows = {}
        self._backward_requires_autograd = backward_requires_autograd
        if use_full_backward is not None:
            logger.warning("use_full_backward no longer has an effect: the schedule says which backwards are split")

    def _place_stages(self, rank_of: dict[int, int]) -> None:
        self.stage_index_to_group_rank = rank_of
        for stage in self._stages:
            stage.stage_index_to_group_rank = rank_of

    def _initialize_stages(
        self, args: tuple[Any, ...], kwargs: Any, target: Any = None, loss_kwargs: dict[str, Any] | None = None
    ) -> None:
        before = self._stages_forward_initialized, self._stages_backward_initialized
        self._stages_forward_initialized, self._stages_backward_initialized = self._initialize_pp_stages(
            self._stages, args, kwargs, target, *before, loss_kwargs=loss_kwargs
        )
        if before != (self._stages_forward_initialized, self._stages_backward_initialized):
            self._validate_adjacent_stage_communication()

    def _validate_adjacent_stage_communication(self) -> None:
        """Stages exchange tensors with their neighbours only, unless they say what each sends to which other one."""
        if edges_of(self._stages) is not None:
            return
        for stage in self._stages:
            index = stage.stage_index
            sources = {getattr(info, "source", None) for info in stage.args_recv_info[0]}
            targets = {target for each in stage.act_send_info.values() for target in each}
            for way, found, allowed in (
                ("receives from", sources, set() if stage.is_first else {index - 1}),
                ("sends to", targets, set() if stage.is_last else {index + 1}),
            ):
                if others := sorted(found - allowed - {None}):
                    raise RuntimeError(
                        f"stage {index} {way} stages {others}, but schedules of several stages per rank have "
                        f"adjacent-stage communication only, here with {sorted(allowed)}; pass what a later stage "
                        "needs through the stages in between"
                    )

    def _validate_and_set_stage_mapping(self, actions: Mapping[int, Any]) -> None:
        """Check an order, and place the stages as it does."""
        self._place_stages(_validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches))

    def _dump_csv(self, filename: str) -> None:
        """Write the order to a file: a row per rank, an empty cell for an idle step."""
        write_csv(filename, self.pipeline_order)

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:  # noqa: A002
        """Read an order that ``_dump_csv`` wrote; here it is compute-only."""
        if format != "compute_only":
            raise OrderError(f'format must be "compute_only", got {format}')
        self.pipeline_order.update(read_csv(filename))
        self._validate_and_set_stage_mapping(self.pipeline_order)

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
        needs_autograd = self._backward_requires_autograd
        microbatches = self._begin_step(self._stages, args, kwargs, target, needs_autograd=needs_autograd)
        with self._step_of(self._stages):
            self._step_microbatches(*microbatches, losses, return_outputs, loss_kwargs=loss_kwargs)
        return self._outputs_of(self._stages) if return_outputs else None

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        batch = Batch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)
        self._run_step(batch, self._stages, self._program, self._initialize_stages)

    def _program(self, mode: Mode) -> Compiled:
        """Get the program of this rank: the order with transfers, which are not part of it."""
        trains, order, edges = self._has_backward, self.pipeline_order, edges_of(self._stages)
        return self._kept.program(
            order,
            self.rank,
            self._stages,
            self._n_microbatches,
            {},
            trains,
            mode,
            lambda: program_of_order(
                compute_rows_with_transfers(order, self.stage_index_to_group_rank, self._num_stages, edges),
                self.rank,
                self._stages_by_index(),
                self._n_microbatches,
                calls=CallConvention(),
                trains=trains,
                mode=mode,
                scales_after_backward=True,
                edges=edges,
            ),
        )

    def _stages_by_index(self) -> dict[int, Any]:
        return {stage.stage_index: stage for stage in self._stages}

    def _log_failure(self, place: int) -> None:
        super()._log_failure(place)
        logger.error("rank %s ran this order:", self.rank)
        logger.error("%s", _format_pipeline_order(self.pipeline_order))


def read_csv(filename: str) -> Rows:
    """Read the rows of a file: a row per rank, an empty cell for an idle step."""
    with Path(filename).open(newline="", encoding="utf-8") as file:
        return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


def write_csv(filename: str, rows: Mapping[int, Any]) -> None:
    """Write what ``read_csv`` reads."""
    with Path(filename).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows.values())
