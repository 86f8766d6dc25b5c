"""Prepares stages: connects neighbours, and agrees with them on the tensors between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.execution.preserved_state import preserved_random_state
from penstock.pipelining._engine.preparation import NegotiatedState
from penstock.pipelining._schedule.microbatches import ScheduleMicrobatches
from penstock.pipelining._schedule.passes import OrderError
from penstock.pipelining._schedule.upstream_names import upstream_names
from penstock.pipelining._stage.inference import StageInference
from penstock.pipelining._stage.metadata import _StageMeta
from penstock.pipelining._stage.sharded_batch import check_samples
from penstock.pipelining._utils import InferenceMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipelining.stage import _PipelineStageBase


class SchedulePreparation(ScheduleMicrobatches):
    """A schedule that prepares its stages before the first step."""

    _loss_fn: Callable[..., torch.Tensor] | None
    _preparation: NegotiatedState

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
    """Take the shapes of examples, where ranks cannot talk to agree on them."""
    for stage in stages:
        if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
            raise RuntimeError(
                f"stage {stage.stage_index} does not know its shapes, and cannot receive them through a fake "
                "process group; pass input_args and output_args (and for DTensors input_grads and output_grads) to "
                "PipelineStage"
            )
        stage._inference_mode = InferenceMode.STATIC


def _devices_of(stages: list[Any]) -> set[torch.device]:
    """Find the devices of a rank's stages, which are of one type besides the CPU."""
    devices = {torch.device(stage.device) for stage in stages}
    kinds = {device.type for device in devices if device.type != "cpu"}
    if len(kinds) > 1:
        raise OrderError(f"the stages of a rank must be on devices of one type, not of {', '.join(sorted(kinds))}")
    return devices
