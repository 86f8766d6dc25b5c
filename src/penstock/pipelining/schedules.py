"""The schedule classes of ``torch.distributed.pipelining.schedules``, with its names and its behaviour.

Orders come from ``penstock.schedules``, passes from ``penstock.lowering``; what a step does is compiled once into a
program (``_schedule_engine.py``). Names that programs replace in this module, such as ``_batch_p2p``, are looked up
here when they are used.
"""

from __future__ import annotations

import csv
import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.overrides import has_torch_function
from torch.profiler import record_function

from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
)
from penstock.pipelining._orders import (
    _get_1f1b_rank_ops,
    _get_warmup_ops,
    dual_pipe_v_row,
    interleaved_row,
    looped_bfs_row,
    with_bubbles,
    zbv_row,
)
from penstock.pipelining._schedule_actions import (
    _Action,
    _action_regex,
    _ComputationType,
    _get_profiler_function_name,
)
from penstock.pipelining._schedule_checks import _validate_schedule
from penstock.pipelining._schedule_engine import Calls, Step
from penstock.pipelining._schedule_passes import (
    OrderError,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _defer_recv_ops,
    _merge_bw,
    _requires_reduce_grad,
    compute_rows_with_transfers,
    lowered_rows,
)
from penstock.pipelining._schedule_pictures import _dump_chrometrace, _format_pipeline_order, _simulate_comms_compute
from penstock.pipelining._schedule_programs import Kept, of_gpipe, of_one_f_one_b, of_order
from penstock.pipelining._schedule_rows import as_rows
from penstock.pipelining._utils import InferenceMode, generate_rank_to_stage_mapping, generate_stage_to_rank_mapping
from penstock.pipelining.microbatch import TensorChunkSpec, _split_tensor, merge_chunks, split_args_kwargs_into_chunks
from penstock.pipelining.stage import PipelineStage, _PipelineStageBase, _RecvInfo
from penstock.schedules.gpipe import gpipe
from penstock.schedules.one_f_one_b import one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.pipelining._schedule_engine import Custom, Program
    from penstock.pipelining._schedule_rows import LoweredRows, Row, Rows

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]

logger = logging.getLogger(__name__)

F = FORWARD
I = BACKWARD_INPUT  # noqa: E741
W = BACKWARD_WEIGHT
B = FULL_BACKWARD

_TARGET_CHUNK_SPEC = TensorChunkSpec(0)

#: The programs of one stage per rank are made from no order.
_NO_ORDER: dict[int, list[Any]] = {0: []}

#: What ``step`` takes besides the arguments of the model, for batches that are split already.
_SPLIT = ("arg_mbs", "kwarg_mbs", "target_mbs")


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Begin sends or receives one by one, or both together in one batch.

    Coalesced operations wait in line on one stream, where independent ones could overlap. Sends and receives of one
    call are coalesced nevertheless, where the backend can, lest two ranks both wait to send.
    """
    if not p2p_ops:
        return []
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s", desc or "messages", p2p_ops)
    kinds = {each.op for each in p2p_ops}
    if kinds == {dist.isend}:
        return [_begun(each, "group_dst") for each in p2p_ops]
    if kinds == {dist.irecv}:
        return [_begun(each, "group_src") for each in p2p_ops]
    if dist.batch_isend_irecv is _BATCH and kinds <= {_ISEND, _IRECV} and not _coalesces(p2p_ops[0]):
        return [_begun(each, "group_dst" if each.op is _ISEND else "group_src") for each in p2p_ops]
    return dist.batch_isend_irecv(p2p_ops)


# The functions themselves: what a program has put in their place is called as it is.
_ISEND, _IRECV, _BATCH = dist.isend, dist.irecv, dist.batch_isend_irecv


def _coalesces(message: dist.P2POp) -> bool:
    """Whether the backend makes one operation of several; else a batch of them is a loop."""
    group = message.group
    return type(group) is dist.ProcessGroup and bool(group._get_backend(message.tensor.device).supports_coalescing)


def _begun(message: dist.P2POp, side: str) -> Any:
    """What ``dist.isend`` or ``dist.irecv`` returns for a message, whose group and peer are known already."""
    tensor, op = message.tensor, message.op
    if not has_torch_function((tensor,)) and not tensor.is_complex():
        if op is _ISEND:
            return message.group.send([tensor], message.group_peer, message.tag)
        if op is _IRECV and message.group_peer is not None:
            return message.group.recv([tensor], message.group_peer, message.tag)
    return op(tensor, group=message.group, tag=message.tag, **{side: message.group_peer})


def _sorted_batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> dict[int, list[dist.Work]]:
    """A batch per peer, in the order of the peers: the same order on all ranks, so that none waits for another."""
    by_peer: dict[int, list[dist.P2POp]] = defaultdict(list)
    for each in p2p_ops:
        by_peer[each.peer].append(each)
    return {peer: _batch_p2p(by_peer[peer], desc=desc) for peer in sorted(by_peer)}


def _wait_batch_p2p(work: list[dist.Work]) -> None:
    """Wait for what ``_batch_p2p`` began."""
    for each in work:
        each.wait()


def _posted_by_peer(messages: list[dist.P2POp], desc: str) -> list[dist.Work]:
    return [work for works in _sorted_batch_p2p(messages, desc=desc).values() for work in works]


class _PipelineSchedule(ABC):
    """What all schedules have in common: a step goes through ``_step_microbatches``.

    Attributes:
        scale_grads: whether gradients are divided by the number of microbatches; right for a loss that is a mean.
    """

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
        self._kept = Kept()
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
        if stage.is_last and self._loss_fn is not None:
            target = target_mbs[mb_index]  # type: ignore[index]  # upstream's TypeError for a target that is not given
            loss = self._compute_loss(output, target, loss_kwargs)
            self._loss_places[mb_index] = len(self._internal_losses)
            self._internal_losses.append(loss)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        """The loss of a microbatch; None if the stage is not the last, or there is no loss function."""
        if not stage.is_last or self._loss_fn is None or not self._internal_losses:
            return None
        place = self._loss_places.get(mb_index, mb_index)
        if not 0 <= place < len(self._internal_losses):
            raise RuntimeError(
                f"the loss of microbatch {mb_index} is not there; there are {len(self._internal_losses)} losses, of "
                f"microbatches {sorted(self._loss_places)}"
            )
        return self._internal_losses[place]

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Hand the losses over in the order of the microbatches, and forget them."""
        stages = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in stages):
            found = self._internal_losses
            if len(found) != self._n_microbatches:
                raise RuntimeError(f"Expecting {self._n_microbatches} losses but got {len(found)}")
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
            self._agree_on_shapes(stages, has_backward)
        elif not p2p_done:
            messages = [message for stage in stages for message in stage._get_init_p2p_neighbors_ops()]
            _wait_batch_p2p(_batch_p2p(messages))

    def _agree_on_shapes(self, stages: list[Any], has_backward: bool) -> None:
        vote: torch.Tensor | None = None
        for stage in stages:
            vote = stage._warmup_forward_vote(has_backward, received_acc=vote)
        for stage in reversed(stages):
            vote = stage._warmup_backward_result(received_result=vote)
            if vote is None:
                raise RuntimeError(f"stage {stage.stage_index} got no answer whether shapes are given or to be found")
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
            return fwd_initialized, bwd_initialized
        stages = sorted(stages, key=lambda stage: stage.stage_index)
        if not fwd_initialized:
            self._warmup_p2p(stages, self._has_backward, connected)
        with _untouched_generators(stages):
            if not fwd_initialized:
                self._prepare_forwards(stages, args, kwargs)
            if for_backward:
                self._prepare_backwards(stages, target, loss_kwargs)
        for stage in stages:
            if hasattr(stage, "_post_metadata_inference_cleanup"):
                stage._post_metadata_inference_cleanup()
        return True, bwd_initialized or for_backward

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

    def _step(
        self,
        stages: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        *,
        needs_autograd: bool = True,
    ) -> Any:
        """A step of these stages."""
        if self._has_backward and needs_autograd and not torch.is_grad_enabled():
            raise RuntimeError("step() runs backwards, and gradients are switched off here; call eval() instead")
        for stage in stages:
            stage.has_backward = self._has_backward
        for stage in stages:
            stage.clear_runtime_states()
        arg_mbs, kwarg_mbs, target_mbs = self._microbatches_of(args, kwargs, target)
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)
        for stage in stages:
            if stage.is_last and return_outputs:
                return self._merge_outputs(stage.output_chunks)
        return None

    def _microbatches_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[list[Any] | None, list[Any] | None, list[Any] | None]:
        """The microbatches of what ``step`` is given."""
        if any(name in kwargs for name in _SPLIT):
            if args or target is not None or not kwargs.keys() <= set(_SPLIT):
                raise ValueError(
                    f"{', '.join(_SPLIT)} are a whole batch: give no other arguments and no target= beside"
                )
            return kwargs.get("arg_mbs"), kwargs.get("kwarg_mbs"), kwargs.get("target_mbs")
        arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
        if target is None:
            return arg_mbs, kwarg_mbs, None
        return arg_mbs, kwarg_mbs, list(_split_tensor(target, _TARGET_CHUNK_SPEC, self._n_microbatches))

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        """The arguments of each microbatch; empty ones where the rank has no first stage."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        return split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """The outputs of all microbatches as one; along dimension 0 unless told otherwise."""
        return merge_chunks(output_chunks, self._output_merge_spec)

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
                raise ValueError(f"Expecting {self._n_microbatches} {name} but got {len(given)}")
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but got a {type(losses)}")
        arg_mbs = [()] * self._n_microbatches if arg_mbs is None else arg_mbs
        kwarg_mbs = [{}] * self._n_microbatches if kwarg_mbs is None else kwarg_mbs
        return arg_mbs, kwarg_mbs

    def _run(self, program: Program, step: Step) -> None:
        """Run a program."""
        if program.scaled and self.scale_grads and self._n_microbatches != 1:
            _multiply_gradients(program.scaled, self._n_microbatches)
        try:
            program.run(step, record_function, self._tell_failure)
        except BaseException:
            self._forget_losses()
            raise

    def _tell_failure(self, place: int) -> None:
        """Log where in the order a step has failed."""


def _multiply_gradients(stages: list[Any], factor: int) -> None:
    """Make up for the division of all gradients after this step: what earlier steps left there is divided already."""
    gradients = [
        parameter.grad
        for stage in stages
        if isinstance(stage.submod, torch.nn.Module)
        for parameter in stage.submod.parameters()
        if parameter.grad is not None
    ]
    if gradients:
        with torch.no_grad():
            torch._foreach_mul_(gradients, factor)


def _untouched_generators(stages: list[Any]) -> Any:
    """Whatever draws random numbers within leaves no trace."""
    devices = {torch.device(stage.device) for stage in stages}
    others = [device for device in devices if device.type != "cpu"]
    kinds = {device.type for device in others}
    if len(kinds) > 1:
        raise OrderError(f"the stages of a rank are on devices of one type, not of {', '.join(sorted(kinds))}")
    return torch.random.fork_rng(devices=others, device_type=next(iter(kinds), "cuda"))


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
        return self._step([self._stage], args, kwargs, target, losses, return_outputs, loss_kwargs)

    step.__doc__ = _PipelineSchedule.step.__doc__

    def _get_pipeline_order(self) -> Rows | None:
        """The order for tools that show it; None if there is none."""
        return None

    def _run_program(
        self,
        make: Callable[[bool], Program],
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any] | None,
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        *,
        by_peer: bool,
    ) -> None:
        """A step, by a program that ``make`` makes for training or for evaluation."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first_target = None if target_mbs is None else target_mbs[0]
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], first_target, loss_kwargs)
        trains = self._has_backward
        program = self._kept.program(_NO_ORDER, 0, [self._stage], {}, trains, lambda: make(trains))
        step = Step(
            schedule=self,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
            post=_posted_by_peer if by_peer else _batch_p2p,
            wait=_wait_batch_p2p,
            forward_receives={},
            backward_receives={},
            counter=Counter(),
            context=lambda: None,
            sends={},
        )
        self._run(program, step)
        self._update_losses(self._stage, losses)


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """The forwards of all microbatches, and nothing else."""

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
            raise RuntimeError("a forward-only schedule computes no loss: give neither a target nor losses=")
        calls = Calls(saves_outputs=False, computes_loss=False)
        self._run_program(
            lambda _: of_gpipe(self._stage, self._n_microbatches, calls=calls, trains=False, backwards=False),
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            losses,
            return_outputs,
            loss_kwargs,
            by_peer=True,
        )


class ScheduleGPipe(PipelineScheduleSingle):
    """GPipe: the forwards of all microbatches, then the backwards."""

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        calls = Calls(tells_whole=False)
        self._run_program(
            lambda trains: of_gpipe(self._stage, self._n_microbatches, calls=calls, trains=trains),
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            losses,
            return_outputs,
            loss_kwargs,
            by_peer=True,
        )

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
        calls = Calls(tells_whole=False)
        self._run_program(
            lambda trains: of_one_f_one_b(
                self._stage, self._num_stages, self._n_microbatches, calls=calls, trains=trains
            ),
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            losses,
            return_outputs,
            loss_kwargs,
            by_peer=False,
        )

    def _get_pipeline_order(self) -> Rows | None:
        rows = as_rows(one_f_one_b(self._num_stages, self._n_microbatches))
        return {rank: [*_add_reduce_grad(row, self._n_microbatches)] for rank, row in rows.items()}


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
        self._with_transfers: tuple[list[Any], LoweredRows] | None = None
        if use_full_backward is not None:
            logger.warning("use_full_backward has no effect any more: the order says which backwards are split")

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
        """Stages exchange tensors with their neighbours only: these orders have no others."""
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
                        f"adjacent-stage communication only, here with {sorted(allowed)}: pass what a later stage "
                        "needs on through the stages between"
                    )

    def _validate_and_set_stage_mapping(self, actions: Mapping[int, Any]) -> None:
        """Check an order, and place the stages as it does."""
        self._place_stages(_validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches))

    def _dump_csv(self, filename: str) -> None:
        """Write the order to a file: a row per rank, an empty cell for an idle step."""
        _write_csv(filename, self.pipeline_order)

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        """Read an order that ``_dump_csv`` wrote; here it is compute-only."""
        if format != "compute_only":
            raise OrderError(f'format must be "compute_only", got {format}')
        self.pipeline_order.update(_read_csv(filename))
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
        return self._step(
            self._stages,
            args,
            kwargs,
            target,
            losses,
            return_outputs,
            loss_kwargs,
            needs_autograd=self._backward_requires_autograd,
        )

    step.__doc__ = _PipelineSchedule.step.__doc__

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first_target = None if target_mbs is None else target_mbs[0]
        self._initialize_stages(arg_mbs[0], kwarg_mbs[0], first_target, loss_kwargs)
        program = self._program()
        step = Step(
            schedule=self,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
            post=_batch_p2p,
            wait=_wait_batch_p2p,
            forward_receives={},
            backward_receives={},
            counter=Counter(),
            context=lambda: _PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses),
            sends={},
        )
        self._run(program, step)
        self._update_losses(self._stages, losses)

    def _program(self) -> Program:
        """The program of this rank: the order with transfers, which are not part of it."""
        trains, order = self._has_backward, self.pipeline_order
        return self._kept.program(
            order,
            self.rank,
            self._stages,
            {},
            trains,
            lambda: of_order(
                compute_rows_with_transfers(order, self.stage_index_to_group_rank, self._num_stages),
                self.rank,
                self._stages_by_index(),
                self._n_microbatches,
                calls=Calls(),
                trains=trains,
                scales_after_backward=True,
            ),
        )

    def _stages_by_index(self) -> dict[int, Any]:
        return {stage.stage_index: stage for stage in self._stages}

    def _tell_failure(self, place: int) -> None:
        logger.error("rank %s: %s failed in this order:", self.rank, type(self).__name__)
        logger.error("%s", _format_pipeline_order(self.pipeline_order))


@dataclass
class _PipelineContext:
    """What a custom function is told about the step.

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


#: The types of action that a custom function may stand for.
_CUSTOM = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule that runs a lowered order: ``_load_csv`` or ``_prepare_schedule_with_comms`` gives it one.

    Attributes:
        pipeline_order_with_comms: for each rank what it does, with transfers, sharding and reductions.
        backward_counter: how many microbatches of each stage are through in this step.
        fwd_recv_ops: activations under way, by stage and microbatch.
        bwd_recv_ops: gradients under way.
        unshard_ops: parameters under way, by stage.
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
            logger.warning("%s has a custom function already, which is replaced", computation_type)
        self._comp_type_to_function_map[computation_type] = custom_function

    def _prepare_schedule_with_comms(
        self, actions: Mapping[int, Any], format: Literal["compute_only", "compute_comms"] = "compute_only"
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
            )
        else:
            raise NotImplementedError(f"there is no format {format!r}; there are compute_only and compute_comms")

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        """Read an order: compute-only, to be lowered, or with everything in it."""
        if format == "compute_only":
            super()._load_csv(filename)
            self._prepare_schedule_with_comms(self.pipeline_order)
        elif format == "compute_comms":
            self._prepare_schedule_with_comms(_read_csv(filename), format=format)
        else:
            raise NotImplementedError(f"there is no format {format!r}; there are compute_only and compute_comms")

    def _dump_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_comms") -> None:
        """Write the order to a file: as it was lowered, or what it computes."""
        if format == "compute_only":
            _write_csv(filename, self.pipeline_order)
        elif format == "compute_comms":
            _write_csv(filename, self.pipeline_order_with_comms)
        else:
            raise NotImplementedError(f"there is no format {format!r}; there are compute_only and compute_comms")

    def _simulate(self) -> Rows:
        """Every rank's actions step by step, with None where it waits."""
        return _simulate_comms_compute(
            self.pipeline_order_with_comms, self.stage_index_to_group_rank.__getitem__, self._num_stages
        )

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        """Wait for the parameters of a stage if they are under way; refuse to go on without them."""
        if not isinstance(stage.submod, FSDPModule):
            return
        index = stage.stage_index
        if index in self.unshard_ops:
            for handle in self.unshard_ops.pop(index):
                if handle is not None:
                    handle.wait()
            self.unsharded_stages.add(index)
        if index not in self.unsharded_stages:
            raise OrderError(f"stage {index} computes while its parameters are sharded; put {index}UNSHARD before")

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first_target = None if target_mbs is None else target_mbs[0]
        self._initialize_stages(arg_mbs[0], kwarg_mbs[0], first_target, loss_kwargs)
        program = self._program()
        self.backward_counter.clear()
        step = Step(
            schedule=self,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
            post=_batch_p2p,
            wait=_wait_batch_p2p,
            forward_receives=self.fwd_recv_ops,
            backward_receives=self.bwd_recv_ops,
            counter=self.backward_counter,
            context=lambda: _PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses),
            sends={},
        )
        try:
            self._run(program, step)
            if self.unshard_ops:
                raise OrderError(f"stages {sorted(self.unshard_ops)} were unsharded and not used after")
        except BaseException:
            self._forget_step()
            raise
        self._update_losses(self._stages, losses)

    def _forget_step(self) -> None:
        """Leave nothing of a failed step to the next."""
        self.fwd_recv_ops.clear()
        self.bwd_recv_ops.clear()
        self.unshard_ops.clear()
        self.unsharded_stages.clear()

    def _program(self) -> Program:
        if getattr(self, "pipeline_order_with_comms", None) is None:
            raise OrderError("there is no order to run; call _prepare_schedule_with_comms() or _load_csv() before")
        trains, rows, customs = self._has_backward, self.pipeline_order_with_comms, self._comp_type_to_function_map
        return self._kept.program(
            rows,
            self.rank,
            self._stages,
            customs,
            trains,
            lambda: of_order(
                rows,
                self.rank,
                self._stages_by_index(),
                self._n_microbatches,
                calls=Calls(gathers=True),
                trains=trains,
                customs=dict(customs),
            ),
        )

    def _tell_failure(self, place: int) -> None:
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
                    f"rank {rank}, step {step}: {action} does not belong into a compute-only order; leave it out, or "
                    "give format='compute_comms' if the order is lowered"
                )


def _read_csv(filename: str) -> Rows:
    with open(filename, newline="", encoding="utf-8") as file:
        return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


def _write_csv(filename: str, rows: Mapping[int, Any]) -> None:
    with open(filename, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows.values())


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


class _ScheduleInterleaved(_PipelineScheduleRuntime):
    """What the interleaved schedules share: microbatches go through the stages of a rank in rounds."""

    _name = ""

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
        self.number_of_rounds = max(1, n_microbatches // self.pp_group_size)
        self.microbatches_per_round = n_microbatches // self.number_of_rounds
        if n_microbatches % self.number_of_rounds != 0:
            raise ValueError(
                f"{self._name} needs a multiple of the number of rounds ({self.number_of_rounds}) of microbatches, "
                f"not {n_microbatches}"
            )
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        raise NotImplementedError


class ScheduleInterleaved1F1B(_ScheduleInterleaved):
    """1F1B with several stages per rank, which takes the earlier microbatch first.

    The number of microbatches has to be a multiple of ``max(1, microbatches // ranks)``: e.g. 10 or 3 on 4 ranks.
    """

    _name = "Interleaved 1F1B"

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
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            backward_requires_autograd,
            defer_pp_recv,
        )
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return interleaved_row(
            rank,
            self.pp_group_size,
            self.n_local_stages,
            self._n_microbatches,
            self.microbatches_per_round,
            zero_bubble=False,
        )


class ScheduleInterleavedZeroBubble(_ScheduleInterleaved):
    """Interleaved 1F1B with split backwards: weight gradients fill the bubbles."""

    _name = "Zero bubble"

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
        _check_torch_compile_compatibility(stages, type(self).__name__)
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            backward_requires_autograd,
            defer_pp_recv,
        )
        self.pipeline_order = self._add_bubbles_to_actions(self.n_local_stages * self.pp_group_size)
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return interleaved_row(
            rank,
            self.pp_group_size,
            self.n_local_stages,
            self._n_microbatches,
            self.microbatches_per_round,
            zero_bubble=True,
        )

    def _add_bubbles_to_actions(self, num_stages_global: int) -> Rows:
        """The order with idle steps where a rank waits for a forward."""
        return with_bubbles(self.pipeline_order)


class _ScheduleV(_PipelineScheduleRuntime):
    """What the schedules of two stages per rank, placed in a V, share."""

    _name = ""

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
        self._place_stages(generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages, style="v"))
        self.n_local_stages = len(stages)
        self.num_stages = self._num_stages
        if self.n_local_stages != 2:
            raise ValueError(f"{self._name} has exactly 2 stages per rank, not {self.n_local_stages}")
        self._check_size()
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _check_size(self) -> None:
        """Refuse sizes that there is no order for."""

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        raise NotImplementedError


class ScheduleZBVZeroBubble(_ScheduleV):
    """Zero bubble in a V: two stages per rank, split backwards. No bubbles if F, I and W take the same time."""

    _name = "ZBV"

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return zbv_row(rank, self.pp_group_size, self._n_microbatches)


class ScheduleDualPipeV(_ScheduleV):
    """A V in which forwards overlap with backwards, as in DeepSeek's DualPipe."""

    _name = "DualPipeV"

    def _check_size(self) -> None:
        if self._n_microbatches < self._num_stages:
            raise ValueError(
                f"DualPipeV needs at least as many microbatches as stages: {self._n_microbatches} < {self._num_stages}"
            )

    def _calculate_single_rank_operations(self, rank: int) -> Row:
        return dual_pipe_v_row(rank, self.pp_group_size, self._n_microbatches)


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The class of a schedule by its name; case does not matter.

    >>> get_schedule_class("1f1b").__name__
    'Schedule1F1B'
    """
    classes: dict[str, type[_PipelineSchedule]] = {
        "1F1B": Schedule1F1B,
        "Interleaved1F1B": ScheduleInterleaved1F1B,
        "GPipe": ScheduleGPipe,
        "LoopedBFS": ScheduleLoopedBFS,
        "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
        "PipelineScheduleSingle": PipelineScheduleSingle,
        "PipelineScheduleMulti": PipelineScheduleMulti,
        "ZBVZeroBubble": ScheduleZBVZeroBubble,
        "DualPipeV": ScheduleDualPipeV,
    }
    found = {name.lower(): kind for name, kind in classes.items()}.get(schedule_name.lower())
    if found is None:
        raise ValueError(f"there is no schedule {schedule_name!r}; there are {', '.join(classes)}")
    return found


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    """Refuse compiled modules: their backward is one piece, and cannot be split.

    Raises:
        RuntimeError: a stage has one.
    """
    compiling = sys.modules.get("torch._dynamo.eval_frame")
    if compiling is None:  # then nothing can be compiled yet
        return
    for stage in stages:
        for module in stage.submod.modules() if isinstance(stage.submod, torch.nn.Module) else ():
            if isinstance(module, compiling.OptimizedModule):
                raise RuntimeError(
                    f"{schedule_name} splits backwards, which torch.compile makes one piece of; compile functions "
                    "within the module instead, or take a schedule with whole backwards"
                )
