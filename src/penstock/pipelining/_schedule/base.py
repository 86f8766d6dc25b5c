"""What all schedules have in common: a step around ``_step_microbatches``."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.pipelining._engine.gradient_scaling import scaled_once
from penstock.pipelining._engine.mode_selection import Mode, select_mode, step_scope
from penstock.pipelining._engine.native import NativeStep
from penstock.pipelining._engine.preparation import NegotiatedState
from penstock.pipelining._engine.programs import ProgramCache
from penstock.pipelining._engine.replicas import ReplicaSums
from penstock.pipelining._engine.step import MethodStep
from penstock.pipelining._schedule.losses import ScheduleLosses
from penstock.pipelining._schedule.preparation import SchedulePreparation
from penstock.pipelining._schedule.upstream_names import upstream_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._engine.native import Native
    from penstock.pipelining._engine.programs import Compiled
    from penstock.pipelining._engine.step import Batch
    from penstock.pipelining.microbatch import TensorChunkSpec

logger = logging.getLogger("penstock.pipelining.schedules")


class _PipelineSchedule(SchedulePreparation, ScheduleLosses, ABC):
    """What all schedules have in common: a step goes through ``_step_microbatches``.

    Attributes:
        scale_grads: whether gradients are divided by the number of microbatches; right for a loss that is a mean.
        allow_untrained: accept a step that trains nothing, or in which a stage passes no gradient on although it has
            something to train; by default it is an error.
    """

    allow_untrained = False
    #: Whether a step has failed while messages were on their way to this rank.
    _was_cut_off = False
    #: Whether a step has run.
    _has_run = False

    def __init__(
        self,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self.scale_grads = scale_grads
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._has_backward = loss_fn is not None
        self._internal_losses: list[torch.Tensor] = []
        self._loss_places: dict[int, int] = {}
        self._kept = ProgramCache()
        self._replicas = ReplicaSums()
        self._preparation = NegotiatedState()
        logger.info("Using %s", type(self).__name__)

    @abstractmethod
    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run a step on microbatches."""
        raise NotImplementedError

    @abstractmethod
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step on a whole batch, which is split into microbatches.

        Args:
            args: the arguments of the model, on the rank of the first stage.
            target: the target of the loss, on the rank of the last stage.
            losses: is filled with the loss of each microbatch, on the rank of the last stage.
            return_outputs: whether the merged outputs are returned, on the rank of the last stage.
            loss_kwargs: more arguments of the loss function.
            kwargs: keyword arguments of the model. A batch that is split already is given as ``arg_mbs``, a list with
                the arguments of each microbatch, ``kwarg_mbs`` and ``target_mbs``, and nothing else.
        """
        raise NotImplementedError

    def eval(self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """Run the forwards of a step only, with the arguments of ``step``."""
        trains = self._has_backward
        self._has_backward = False
        try:
            return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = trains

    # Overriding ``step`` calls these and ``_step_microbatches`` one after the other, so that no frame is between them.

    def _begin_step(
        self, stages: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, needs_autograd: bool
    ) -> tuple[list[Any] | None, list[Any] | None, list[Any] | None]:
        """Prepare stages for a step; return the arguments, keyword arguments and targets of each microbatch."""
        if self._has_backward and needs_autograd and not torch.is_grad_enabled():
            raise RuntimeError("step() runs a backward pass, but gradients are disabled; call eval() instead")
        for stage in stages:
            stage.has_backward = self._has_backward
            if hasattr(stage, "_allows_untrained"):
                stage._allows_untrained = self.allow_untrained
        for stage in stages:
            stage.clear_runtime_states()
        return self._microbatches_of(args, kwargs, target)

    @contextmanager
    def _step_of(self, stages: list[Any]) -> Iterator[None]:
        """Wrap a step of these stages: sum gradients of replicated parameters, and clean up, also if it fails."""
        try:
            with self._replicas.in_step(stages, trains=self._has_backward):
                yield
        except BaseException:
            self._next_microbatches, self._whole = ([], []), None
            _end(stages, failed=True)
            raise
        _end(stages)

    def _outputs_of(self, stages: list[Any]) -> Any:
        """Merge the outputs of a step, on the rank of the last stage."""
        for stage in stages:
            if stage.is_last:
                if hasattr(stage, "_order_outputs"):
                    stage._order_outputs()
                return self._merge_outputs(stage.output_chunks)
        return None

    def _run_step(
        self,
        batch: Batch,
        stages: list[Any],
        program: Callable[[Mode], Compiled],
        initialize: Callable[..., None],
    ) -> None:
        """Run a step: what ``_step_microbatches`` does.

        Args:
            batch: what it was given.
            stages: the stages of this rank.
            program: compiles their program, or finds it, in a mode.
            initialize: prepares them before the first step, given the arguments of a microbatch.
        """
        customs = self._customs()
        mode, made, step = self._prepare_step(batch, stages, program, initialize, customs)
        replicas = self._replicas.in_step(stages, trains=self._has_backward)  # unless step() is around it
        with step_scope(stages, customs, mode), replicas, self._running(made, step):
            made.program.run(step, made.progress, upstream_names().record_function)
        self._update_losses(stages, batch.losses)

    def _prepare_step(
        self,
        batch: Batch,
        stages: list[Any],
        program: Callable[[Mode], Compiled],
        initialize: Callable[..., None],
        customs: Collection[ComputationType],
    ) -> tuple[Mode, Compiled, Any]:
        if self._was_cut_off:
            raise RuntimeError(
                "the previous step failed with messages still in flight, which this step would receive; destroy the "
                "process group, then rebuild group, stages and schedule"
            )
        targets = batch.target_mbs
        arg_mbs, kwarg_mbs = self._check_inputs(batch.arg_mbs, batch.kwarg_mbs, targets, batch.losses)
        mode = select_mode(stages, upstream_names(), is_plain=not customs and self._computes_loss_as_written())
        made = None
        if mode is not Mode.NATIVE or not self._has_run:
            made = program(min(mode, Mode.DIRECT))  # it refuses an order of other stages before ranks communicate
        self._next_microbatches = arg_mbs, kwarg_mbs
        initialize(arg_mbs[0], kwarg_mbs[0], None if targets is None else targets[0], batch.loss_kwargs)
        self._next_microbatches, self._whole = ([], []), None
        self._has_run = True
        if made is None or mode is Mode.NATIVE:
            made = program(Mode.NATIVE)  # what goes between stages is known by now
        new_step = self._new_step if made.native is None else partial(self._new_native_step, made.native)
        return mode, made, new_step(batch, arg_mbs, kwarg_mbs)

    def _customs(self) -> Collection[ComputationType]:
        """Get the types of the actions in place of which functions of the user run."""
        return ()

    def _new_native_step(self, native: Native, batch: Batch, arg_mbs: list[Any], kwarg_mbs: list[Any]) -> NativeStep:
        return NativeStep(
            self,
            self._n_microbatches,
            args=arg_mbs,
            kwargs=kwarg_mbs,
            targets=batch.target_mbs,
            return_outputs=batch.return_outputs,
            loss_kwargs=batch.loss_kwargs,
            stages=native.stages,
            trains=self._has_backward,
        )

    def _new_step(self, batch: Batch, arg_mbs: list[Any], kwarg_mbs: list[Any]) -> MethodStep:
        """Make the state of a step, with these arguments in place of what may not be given."""
        names, targets, losses = upstream_names(), batch.target_mbs, batch.losses
        return MethodStep(
            schedule=self,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=targets,
            return_outputs=batch.return_outputs,
            loss_kwargs=batch.loss_kwargs,
            post=names._batch_p2p,
            wait=names._wait_batch_p2p,
            context=lambda: names._PipelineContext(self, arg_mbs, kwarg_mbs, targets, losses),
        )

    @contextmanager
    def _running(self, made: Compiled, step: Any) -> Iterator[None]:
        """Wrap a program that runs."""
        factor = self._n_microbatches if self.scale_grads else 1
        native = made.native
        try:
            with scaled_once(made.scaled, factor), nullcontext() if native is None else native.scope():
                yield
            if native is not None:
                step.detach_losses()
        except BaseException as error:
            line = made.program.line_at(made.progress)
            if line is not None and isinstance(error, Exception):
                self._log_failure(line.position)
            self._forget_losses()
            in_flight = (isinstance(work, dist.Work) and not work.is_completed() for work in step.receives)
            self._was_cut_off = any(in_flight) or made.has_transfers_left()
            if native is not None and isinstance(error, Exception):
                failure = native.describe_failure(step, error)
                if failure is not None:
                    try:
                        raise failure from error
                    finally:
                        del failure  # this frame is in its traceback: together they would hold the group
            raise

    def _log_failure(self, place: int) -> None:
        """Log where a step has failed."""
        logger.error("%s failed at operation %s of its program", type(self).__name__, place)


def _end(stages: list[Any], *, failed: bool = False) -> None:
    """End a step of these stages, which may be stand-ins."""
    for stage in stages:
        if failed and hasattr(stage, "_forget_failed_step"):
            stage._forget_failed_step()
        if (split := getattr(stage, "_split", None)) is not None:
            split.end_step()
