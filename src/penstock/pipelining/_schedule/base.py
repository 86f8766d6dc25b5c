"""What all schedules have in common: losses, preparing stages, and a step around ``_step_microbatches``."""

from __future__ import annotations

import logging
import sys
import warnings
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from penstock.execution.preserved_state import preserved_random_state
from penstock.pipelining._engine.gradient_scaling import scaled_once
from penstock.pipelining._engine.mode_selection import Mode, select_mode, step_scope
from penstock.pipelining._engine.native import NativeStep
from penstock.pipelining._engine.preparation import NegotiatedState
from penstock.pipelining._engine.programs import ProgramCache
from penstock.pipelining._engine.step import MethodStep
from penstock.pipelining._schedule.passes import OrderError
from penstock.pipelining._stage.inference import StageInference
from penstock.pipelining._stage.metadata import _StageMeta
from penstock.pipelining._stage.sharded_batch import (
    check_same_sharding,
    check_samples,
    count_samples,
    has_dtensors,
    restore_order,
)
from penstock.pipelining._utils import InferenceMode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._engine.native import Native
    from penstock.pipelining._engine.programs import Compiled
    from penstock.pipelining._engine.step import Batch
    from penstock.pipelining._stage.sharded_batch import Samples
    from penstock.pipelining.microbatch import TensorChunkSpec
    from penstock.pipelining.stage import _PipelineStageBase

logger = logging.getLogger("penstock.pipelining.schedules")

#: What ``step`` takes besides the arguments of the model, for batches that are split already.
_SPLIT = ("arg_mbs", "kwarg_mbs", "target_mbs")
_NAMES: Final = "penstock.pipelining.schedules"


def upstream_names() -> Any:
    """The module with the path of upstream's: where programs put functions of their own in place of those there."""
    return sys.modules.get(_NAMES) or import_module(_NAMES)


class _PipelineSchedule(ABC):
    """What all schedules have in common: a step goes through ``_step_microbatches``.

    Attributes:
        scale_grads: whether gradients are divided by the number of microbatches; right for a loss that is a mean.
        allow_untrained: accept a step that trains nothing, or in which a stage passes no gradient on although it has
            something to train; by default it is an error.
    """

    allow_untrained = False

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
        self._preparation = NegotiatedState()
        logger.info("Using %s", type(self).__name__)

    # Losses -----------------------------------------------------------------------------------------------------------

    def _maybe_compute_loss(
        self,
        stage: Any,
        output: Any,
        target_mbs: list[Any] | None,
        mb_index: int,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """The loss of a microbatch, if the stage is the last and there is a loss function."""
        if self._loss_fn is not None and stage.is_last:
            if target_mbs is None:
                raise TypeError("there is a loss function, but no target; pass target= on the rank of the last stage")
            loss = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)
            self._loss_places[mb_index] = len(self._internal_losses)
            self._internal_losses.append(loss)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        """The loss of a microbatch; None if the stage is not the last, or there is no loss function."""
        if self._loss_fn is None or not self._internal_losses or not stage.is_last:
            return None
        place = self._loss_places.get(mb_index, mb_index)
        if not 0 <= place < len(self._internal_losses):
            raise RuntimeError(
                f"the loss of microbatch {mb_index} is missing; there are {len(self._internal_losses)} losses, of "
                f"microbatches {sorted(self._loss_places)}"
            )
        return self._internal_losses[place]

    def _replace_loss(self, mb_index: int, loss: torch.Tensor) -> None:
        self._internal_losses[self._loss_places.get(mb_index, mb_index)] = loss

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Hand the losses over in the order of the microbatches, and forget them."""
        stages = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in stages):
            found = self._internal_losses
            if len(found) != self._n_microbatches:
                why = "; the schedule has no loss_fn" if self._loss_fn is None else ""
                raise RuntimeError(f"Expecting {self._n_microbatches} losses but got {len(found)}{why}")
            places = [self._loss_places.get(number, number) for number in range(len(found))]
            losses[:] = [found[place] for place in places]
        self._forget_losses()

    def _forget_losses(self) -> None:
        self._internal_losses.clear()
        self._loss_places.clear()

    def _compute_loss(self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None) -> Any:
        return self._loss_fn(output, target, **(loss_kwargs or {}))  # type: ignore[misc]  # asked only if there is one

    # Preparing stages -------------------------------------------------------------------------------------------------

    def _warmup_p2p(self, stages: list[_PipelineStageBase], has_backward: bool, p2p_done: bool) -> None:
        """Connect neighbours, and agree with them whether shapes are given or have to be found.

        Args:
            stages: the stages of this rank.
            has_backward: whether there are backwards.
            p2p_done: whether neighbours are connected already.
        """
        if all(hasattr(stage, "_warmup_forward_vote") for stage in stages):
            agree = _take_given_shapes if _is_fake_group(stages) else self._agree_on_shapes
            agree(stages, has_backward)
        elif not p2p_done:
            messages = [message for stage in stages for message in stage._get_init_p2p_neighbors_ops()]
            names = upstream_names()
            names._wait_batch_p2p(names._batch_p2p(messages))

    def _agree_on_shapes(self, stages: list[Any], has_backward: bool) -> None:
        vote: torch.Tensor | None = None
        for stage in stages:
            vote = stage._warmup_forward_vote(has_backward, received_acc=vote)
        self._batch_samples = getattr(stages[-1], "_batch_samples", None)
        check_samples(self._count_samples(), self._batch_samples, self._n_microbatches)
        for stage in reversed(stages):
            vote = stage._warmup_backward_result(received_result=vote)
            if vote is None:
                raise RuntimeError(
                    f"stage {stage.stage_index} got no answer on whether shapes are given or must be inferred"
                )
            stage._inference_mode = InferenceMode.STATIC if vote.item() == 1 else InferenceMode.DYNAMIC

    def _initialize_pp_stages(
        self,
        stages: list[_PipelineStageBase],
        args: tuple[Any, ...] | Any,
        kwargs: dict[str, Any] | None,
        target: Any,
        fwd_initialized: bool,
        bwd_initialized: bool,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> tuple[bool, bool]:
        """Prepare stages before the first step, and when training turns into evaluation or back.

        Returns:
            Whether they are prepared for forwards, and for backwards.
        """
        connected = fwd_initialized
        if fwd_initialized and self._has_backward != bwd_initialized:
            fwd_initialized = bwd_initialized = False
        for_backward = self._has_backward and not bwd_initialized
        if fwd_initialized and not for_backward:
            self._preparation.restore()
            self._check_later_samples(stages)
            return fwd_initialized, bwd_initialized
        stages = sorted(stages, key=lambda stage: stage.stage_index)
        batch = next(iter(self._count_samples().values()), None)
        for stage in stages:
            if hasattr(stage, "_set_microbatches"):  # microbatches that differ in their shapes
                stage._set_microbatches(*self._next_microbatches, batch)
        if not fwd_initialized:
            self._warmup_p2p(stages, self._has_backward, connected)
        with preserved_random_state(_devices_of(stages)):
            if not fwd_initialized:
                self._prepare_forwards(stages, args, kwargs)
            if for_backward:
                self._prepare_backwards(stages, target, loss_kwargs)
        for stage in stages:
            if hasattr(stage, "_post_metadata_inference_cleanup"):
                stage._post_metadata_inference_cleanup()
        self._preparation = NegotiatedState(stages)
        metas = (getattr(stage, "_stage_meta", None) for stage in stages)
        self._has_dtensors = any(isinstance(meta, _StageMeta) and meta.has_dtensors() for meta in metas)
        return True, bwd_initialized or for_backward

    #: Whether a step has failed while messages were on their way to this rank.
    _was_cut_off = False
    #: Whether a step has run.
    _has_run = False
    #: What all microbatches of the step that begins are called with.
    _next_microbatches: tuple[list[Any], list[Any]] = ([], [])
    #: The batch of the step that begins, and the target, if they are not split yet.
    _whole: tuple[Any, Any, Any] | None = None
    #: The samples of the batch for which stages were prepared; None if the user split it.
    _batch_samples: Samples | None = None
    #: Whether DTensors go into or out of a stage of this rank.
    _has_dtensors = False

    def _count_samples(self) -> dict[str, Samples]:
        """Count the samples of what this rank splits, the batch first."""
        if self._whole is None:
            return {}
        specs = self._args_chunk_spec, self._kwargs_chunk_spec, upstream_names()._TARGET_CHUNK_SPEC
        named = zip(("args", "kwargs", "target"), self._whole, specs, strict=True)
        return {place: samples for each in named for place, samples in count_samples(*each).items()}

    def _check_later_samples(self, stages: list[Any]) -> None:
        """Hold the batch of a later step to what ranks agreed on; without DTensors samples have one order."""
        agreed = self._batch_samples
        target = None if self._whole is None else self._whole[2]
        if not self._has_dtensors and (agreed is None or agreed.is_whole) and not has_dtensors(target):
            return
        counts = self._count_samples()
        if any(stage.is_first for stage in stages):
            check_same_sharding(next(iter(counts.values()), None), agreed)
        check_samples(counts, agreed, self._n_microbatches)

    def _prepare_forwards(self, stages: list[Any], args: Any, kwargs: Any) -> None:
        passed: Any = None
        for stage in stages:
            given = args if stage.is_first else passed
            passed = stage._prepare_forward_infra(self._n_microbatches, given, kwargs, has_backward=self._has_backward)

    def _prepare_backwards(self, stages: list[Any], target: Any, loss_kwargs: Any) -> None:
        passed: Any = None
        for stage in reversed(stages):
            passed = stage._prepare_backward_infra(
                self._n_microbatches,
                loss_fn=self._loss_fn,
                target=target,
                received_grad_meta=passed,
                loss_kwargs=loss_kwargs,
            )

    # Steps ------------------------------------------------------------------------------------------------------------

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
        """Around a step of these stages: clean up, also if it fails."""
        try:
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

    def _microbatches_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[list[Any] | None, list[Any] | None, list[Any] | None]:
        """The microbatches of what ``step`` is given."""
        self._whole = None
        if kwargs:
            split = {name: kwargs.get(name) for name in _SPLIT}
            kwargs = {name: value for name, value in kwargs.items() if name not in _SPLIT}
            if any(value is not None for value in split.values()):
                _check_split(split, args, kwargs, target)
                return split["arg_mbs"], split["kwarg_mbs"], split["target_mbs"]
        arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
        self._whole = args, kwargs, target
        if target is None:
            return arg_mbs, kwarg_mbs, None
        names = upstream_names()
        targets = list(names._split_tensor(target, names._TARGET_CHUNK_SPEC, self._n_microbatches))
        if self._has_backward and self.scale_grads:
            _warn_of_sizes(targets)
        return arg_mbs, kwarg_mbs, targets

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        """The arguments of each microbatch; empty ones where the rank has no first stage."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        chunks: tuple[list[Any], list[Any]] = upstream_names().split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )
        return chunks

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """The outputs of all microbatches as one; along dimension 0 by default."""
        merged = upstream_names().merge_chunks(output_chunks, self._output_merge_spec)
        batch = self._batch_samples
        if batch is None or (batch.is_whole and not has_dtensors(merged)):
            return merged
        return restore_order(merged, self._output_merge_spec, batch, self._n_microbatches)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """The arguments of each microbatch, empty ones for those that are not given."""
        for name, given in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list but got a {type(given)}")
            if given is not None and len(given) != self._n_microbatches:
                raise ValueError(
                    f"Expecting {self._n_microbatches} {name} but got {len(given)}: a batch needs at least one sample "
                    "for each microbatch"
                )
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but got a {type(losses)}")
        arg_mbs = [()] * self._n_microbatches if arg_mbs is None else arg_mbs
        kwarg_mbs = [{}] * self._n_microbatches if kwarg_mbs is None else kwarg_mbs
        return arg_mbs, kwarg_mbs

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
        with step_scope(stages, customs, mode), self._running(made, step):
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

    def _computes_loss_as_written(self) -> bool:
        return vars(self).keys().isdisjoint(_LOSSES) and _of_losses(type(self)) == _AS_WRITTEN

    def _customs(self) -> Collection[ComputationType]:
        """The types of the actions in place of which functions of the user run."""
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
        """The state of a step that begins, with these arguments in place of what may not be given."""
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
        """Around a program that runs."""
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
                    raise failure from error
            raise

    def _log_failure(self, place: int) -> None:
        """Log where a step has failed."""
        logger.error("%s failed at operation %s of its program", type(self).__name__, place)


_LOSSES: Final = ("_maybe_compute_loss", "_maybe_get_loss")
_of_losses: Final = attrgetter(*_LOSSES)
_AS_WRITTEN: Final = _of_losses(_PipelineSchedule)


def _end(stages: list[Any], *, failed: bool = False) -> None:
    """A step of these stages is over. They may be stand-ins."""
    for stage in stages:
        if failed and hasattr(stage, "_forget_failed_step"):
            stage._forget_failed_step()
        if (split := getattr(stage, "_split", None)) is not None:
            split.end_step()


def _check_split(split: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
    """Microbatches are all that a step is given, and of the form in which a stage is called with them."""
    if args:
        raise ValueError(f"{len(args)} arguments are not split; pass pre-split positional inputs through arg_mbs")
    if kwargs:
        raise ValueError(f"Unexpected keyword arguments with pre-split inputs: {', '.join(kwargs)}; use kwarg_mbs")
    if target is not None:
        raise ValueError("target is not split; pass pre-split targets through target_mbs")
    for name, kind in (("arg_mbs", tuple), ("kwarg_mbs", dict)):
        for index, value in enumerate(split[name] if isinstance(split[name], list) else ()):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must be a list of {kind.__name__}s, but that of microbatch {index} is a "
                    f"{type(value).__qualname__}"
                )


def _warn_of_sizes(targets: list[Any]) -> None:
    """Microbatches count alike, so that the mean of their means is not the mean over the batch if sizes differ."""
    sizes = [one.shape[0] if isinstance(one, torch.Tensor) else len(one) for one in targets]  # len takes much longer
    if len(set(sizes)) > 1:
        warnings.warn(
            f"microbatches have {', '.join(map(str, sizes))} samples but equal weight, because gradients are divided "
            "by the number of microbatches; with a mean loss they differ from the whole batch's. Use an evenly "
            "divisible batch, or a sum loss with scale_grads=False",
            stacklevel=5,
        )


def _is_fake_group(stages: list[Any]) -> bool:
    """Whether a neighbour is on another rank of a fake group, through which nothing comes.

    A stand-in that votes in its own way needs no answer.
    """
    return any(
        getattr(type(stage), "_warmup_forward_vote", None) is StageInference._warmup_forward_vote
        and dist.get_backend(stage.group) == "fake"
        and not all(stage._is_same_rank(other) for other in _neighbours(stage.stage_index, stage.num_stages))
        for stage in stages
    )


def _neighbours(stage: int, stages: int) -> list[int]:
    return [other for other in (stage - 1, stage + 1) if 0 <= other < stages]


def _take_given_shapes(stages: list[Any], has_backward: bool) -> None:
    """What ranks that cannot talk do instead of agreeing."""
    for stage in stages:
        if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
            raise RuntimeError(
                f"stage {stage.stage_index} does not know its shapes, and cannot receive them through a fake "
                "process group; pass input_args and output_args (and for DTensors input_grads and output_grads) to "
                "PipelineStage"
            )
        stage._inference_mode = InferenceMode.STATIC


def _devices_of(stages: list[Any]) -> set[torch.device]:
    """The devices of a rank's stages, which are of one type besides the CPU."""
    devices = {torch.device(stage.device) for stage in stages}
    kinds = {device.type for device in devices if device.type != "cpu"}
    if len(kinds) > 1:
        raise OrderError(f"the stages of a rank must be on devices of one type, not of {', '.join(sorted(kinds))}")
    return devices
