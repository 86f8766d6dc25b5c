"""Schedules of several stages per rank that run a lowered order, with functions of the user in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch.distributed.fsdp import FSDPModule

from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
)
from penstock.pipelining._engine.links import edges_of
from penstock.pipelining._engine.methods import CallConvention
from penstock.pipelining._engine.programs import program_of_order
from penstock.pipelining._schedule.base import logger
from penstock.pipelining._schedule.multi import PipelineScheduleMulti, read_csv, write_csv
from penstock.pipelining._schedule.passes import OrderError, lowered_rows
from penstock.pipelining._schedule.text import _format_pipeline_order, _simulate_comms_compute

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch.distributed as dist

    from penstock.pipelining._engine.mode_selection import Mode
    from penstock.pipelining._engine.native import Native, NativeStep
    from penstock.pipelining._engine.programs import Compiled
    from penstock.pipelining._engine.step import Batch, Custom, MethodStep
    from penstock.pipelining._schedule.actions import _Action, _ComputationType
    from penstock.pipelining._schedule.base import _PipelineSchedule
    from penstock.pipelining._schedule.rows import LoweredRows, Rows
    from penstock.pipelining.stage import _PipelineStageBase


@dataclass
class _PipelineContext:
    """The context of a custom function: the step that runs.

    Attributes:
        schedule_ref: the schedule that runs.
        arg_mbs: the positional arguments of each microbatch.
        kwarg_mbs: the keyword arguments of each.
        target_mbs: the target of each.
        losses: where the user wants the losses.
    """

    schedule_ref: _PipelineSchedule
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


class _CustomFunctionProtocol(Protocol):
    """A function that runs in place of an action."""

    def __call__(self, action: _Action, ctx: _PipelineContext) -> None: ...


#: The types of action that a custom function may replace.
_CUSTOM = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule that runs a lowered order: ``_load_csv`` or ``_prepare_schedule_with_comms`` gives it one.

    Attributes:
        pipeline_order_with_comms: for each rank what it does, with transfers, sharding and reductions.
        backward_counter: how many microbatches of each stage are through in this step.
        fwd_recv_ops: activations in flight, by stage and microbatch.
        bwd_recv_ops: gradients in flight.
        unshard_ops: parameters in flight, by stage.
        unsharded_stages: the stages whose parameters are there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._defer_pp_recv: bool = kwargs.pop("defer_pp_recv", False)
        super().__init__(*args, **kwargs)
        self._comp_type_to_function_map: dict[_ComputationType, Custom] = {}
        self.backward_counter: Counter[int] = Counter()
        self.bwd_recv_ops: dict[tuple[int, int], list[dist.Work]] = {}
        self.fwd_recv_ops: dict[tuple[int, int], list[dist.Work]] = {}
        self.unshard_ops: dict[int, list[Any]] = defaultdict(list)
        self.unsharded_stages: set[int] = set()

    def register_custom_function(
        self, computation_type: _ComputationType, custom_function: _CustomFunctionProtocol
    ) -> None:
        """Run a function in place of every action of a type.

        Args:
            computation_type: any but those of transfers.
            custom_function: is called with the action and a ``_PipelineContext``.
        """
        if computation_type not in _CUSTOM:
            known = ", ".join(kind.name for kind in _CUSTOM)
            raise ValueError(
                f"the computation type {computation_type} cannot have a custom function; these can: {known}"
            )
        if computation_type in self._comp_type_to_function_map:
            logger.warning("replacing the custom function that %s already has", computation_type)
        self._comp_type_to_function_map[computation_type] = custom_function

    def _prepare_schedule_with_comms(
        self,
        actions: Mapping[int, Any],
        format: Literal["compute_only", "compute_comms"] = "compute_only",  # noqa: A002
    ) -> None:
        """Take an order: lower it if it is compute-only, else as it is."""
        super()._validate_and_set_stage_mapping(actions)
        if format == "compute_comms":
            self.pipeline_order_with_comms = _without_idle_steps(actions)
        elif format == "compute_only":
            _check_compute_only(actions)
            self.pipeline_order_with_comms = lowered_rows(
                actions,
                self.stage_index_to_group_rank,
                self._num_stages,
                self._n_microbatches,
                defer=self._defer_pp_recv,
                edges=edges_of(self._stages),
            )
        else:
            raise NotImplementedError(f"unknown format {format!r}; use 'compute_only' or 'compute_comms'")

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:  # noqa: A002
        """Read an order: compute-only, to be lowered, or with everything in it."""
        if format == "compute_only":
            super()._load_csv(filename)
            self._prepare_schedule_with_comms(self.pipeline_order)
        elif format == "compute_comms":
            self._prepare_schedule_with_comms(read_csv(filename), format=format)
        else:
            raise NotImplementedError(f"unknown format {format!r}; use 'compute_only' or 'compute_comms'")

    def _dump_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_comms") -> None:  # noqa: A002
        """Write the order to a file: as it was lowered, or what it computes."""
        if format == "compute_only":
            write_csv(filename, self.pipeline_order)
        elif format == "compute_comms":
            write_csv(filename, self.pipeline_order_with_comms)
        else:
            raise NotImplementedError(f"unknown format {format!r}; use 'compute_only' or 'compute_comms'")

    def _simulate(self) -> Rows:
        """Every rank's actions step by step, with None where it waits."""
        return _simulate_comms_compute(
            self.pipeline_order_with_comms, self.stage_index_to_group_rank.__getitem__, self._num_stages
        )

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        """Wait for the parameters of a stage if they are in flight; refuse to continue without them."""
        if not isinstance(stage.submod, FSDPModule):
            return
        index = stage.stage_index
        if index in self.unshard_ops:
            for handle in self.unshard_ops.pop(index):
                if handle is not None:
                    handle.wait()
            self.unsharded_stages.add(index)
        if index not in self.unsharded_stages:
            raise OrderError(f"stage {index} computes while its parameters are sharded; put {index}UNSHARD before it")

    def _new_native_step(self, native: Native, batch: Batch, arg_mbs: list[Any], kwarg_mbs: list[Any]) -> NativeStep:
        self.backward_counter.clear()
        return super()._new_native_step(native, batch, arg_mbs, kwarg_mbs)

    def _new_step(self, batch: Batch, arg_mbs: list[Any], kwarg_mbs: list[Any]) -> MethodStep:
        self.backward_counter.clear()
        step = super()._new_step(batch, arg_mbs, kwarg_mbs)
        step.forward_receives, step.backward_receives = self.fwd_recv_ops, self.bwd_recv_ops
        step.counter = self.backward_counter
        return step

    @contextmanager
    def _running(self, made: Compiled, step: Any) -> Iterator[None]:
        try:
            with super()._running(made, step):
                yield
            if made.native is not None:
                self.backward_counter.update(made.native.backwards)
            if self.unshard_ops:
                raise OrderError(f"stages {sorted(self.unshard_ops)} were unsharded but not used afterwards")
        except BaseException:
            self._forget_step()
            raise

    def _forget_step(self) -> None:
        """Leave nothing of a failed step to the next."""
        self.fwd_recv_ops.clear()
        self.bwd_recv_ops.clear()
        self.unshard_ops.clear()
        self.unsharded_stages.clear()

    def _customs(self) -> Collection[_ComputationType]:
        return self._comp_type_to_function_map.keys()

    def _program(self, mode: Mode) -> Compiled:
        if getattr(self, "pipeline_order_with_comms", None) is None:
            raise OrderError("no schedule to run; call _prepare_schedule_with_comms() or _load_csv() first")
        trains, rows, customs = self._has_backward, self.pipeline_order_with_comms, self._comp_type_to_function_map
        return self._kept.program(
            rows,
            self.rank,
            self._stages,
            self._n_microbatches,
            customs,
            trains,
            mode,
            lambda: program_of_order(
                rows,
                self.rank,
                self._stages_by_index(),
                self._n_microbatches,
                calls=CallConvention(gathers=True),
                trains=trains,
                mode=mode,
                customs=dict(customs),
                edges=edges_of(self._stages),
            ),
        )

    def _log_failure(self, place: int) -> None:
        action = self.pipeline_order_with_comms[self.rank][place]
        logger.error(
            "rank %s: %s failed at step %s, action %s, of this order:", self.rank, type(self).__name__, place, action
        )
        logger.error("%s", _format_pipeline_order(self.pipeline_order_with_comms, error_step_number=place))


def _without_idle_steps(rows: Mapping[int, Any]) -> LoweredRows:
    for rank, row in rows.items():
        if None in row:
            raise OrderError(f"rank {rank}, step {row.index(None)} is idle; a lowered order has no idle steps")
    return {rank: list(row) for rank, row in rows.items()}


def _check_compute_only(rows: Mapping[int, Any]) -> None:
    for rank, row in rows.items():
        for step, action in enumerate(row):
            if action is not None and not action.is_compute_op:
                raise ValueError(
                    f"rank {rank}, step {step}: {action} is not allowed in a compute-only schedule; remove it, or "
                    "pass format='compute_comms' for a lowered one"
                )
