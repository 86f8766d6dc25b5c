"""When a step fails on one rank, all ranks are told, and nothing half done is left behind."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import PenstockError, StepError
from penstock.runtime import operations
from penstock.runtime.metadata import TensorMeta
from penstock.runtime.transport.failing import step_error
from penstock.runtime.transport.protocol import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.ir.actions import Action
    from penstock.runtime.stage import Stage
    from penstock.runtime.transport.protocol import Transport


class Telling:
    """Around a step: an error here becomes one on every rank, and the pipeline is not used any more.

    A step that failed has added some gradients and not others. So that they are not used, the stages of this rank are
    left without gradients.
    """

    def __init__(
        self, transport: Transport, stages: Iterable[Stage], action: Callable[[], Action | None], *, training: bool
    ) -> None:
        """`action` tells which action is under way, None outside the program."""
        self._transport = transport
        self._stages = stages
        self._action = action
        self._training = training

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        transport = self._transport
        told = transport.fail(transport.explain(error) or failure_of(error, transport.rank, self._action()))
        if self._training:
            for stage in self._stages:
                stage.module.zero_grad(set_to_none=True)
        if isinstance(error, (KeyboardInterrupt, SystemExit, StepError)):
            return
        if isinstance(error, PenstockError) and told.action is None and told.rank == transport.rank:
            return  # a mistake in the call, and it says so best itself
        raise step_error(told) from error


def failure_of(error: BaseException, rank: int, action: Action | None) -> Failure:
    """An error on this rank, as every rank is told of it."""
    place = ""
    if action is not None:
        parts = [f"stage {part.stage_index}, microbatch {part.microbatch_index}" for part in action.leaves]
        place = f" in {action} ({'; '.join([*parts, *_shapes(error)])})"
    said = str(error) or "no message"
    return Failure(
        rank,
        f"rank {rank} failed{place}: {type(error).__name__}: {said}",
        action=str(action) if action else None,
        stage=action.leaves[0].stage_index if action else None,
        microbatch=action.leaves[0].microbatch_index if action else None,
        traceback="".join(traceback.format_exception(error)),
    )


def _shapes(error: BaseException) -> list[str]:
    """What the operation that raised was working on: asked of its frame, since it must not be kept for this."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == operations.__file__:
            for name, told in (("args", "inputs"), ("gradients", "gradients")):
                if tensors := _tensors(frame.f_locals.get(name)):
                    return [f"{told} {', '.join(str(TensorMeta.of(tensor)) for tensor in tensors)}"]
    return []


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
