"""Reports a step that fails on one rank to all ranks, and drops its partial gradients."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import PenstockError, StepError
from penstock.execution.autograd import is_inplace_on_leaf
from penstock.execution.value_spec import describe_tensor
from penstock.ir.actions import FORWARD
from penstock.runtime.transport.failure_messages import step_error
from penstock.runtime.transport.protocol import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.execution.stage import Stage
    from penstock.execution.step import Step
    from penstock.ir.actions import Action
    from penstock.runtime.transport.protocol import Transport


class FailureScope:
    """Wraps a step: an error here becomes one on every rank, and the pipeline cannot be used again.

    A failed step has added some gradients and not others, and some ranks may have completed it, or be doing something
    else by now. So that partial gradients are never used, every rank drops them when it learns of the failure.

    Attributes:
        step: the state of the step, from when its program runs to the end of the scope; an error message says what the
            action that failed worked on.
    """

    def __init__(self, transport: Transport, stages: Iterable[Stage], action: Callable[[], Action | None]) -> None:
        """`action` returns the current action, None outside the program."""
        self._transport = transport
        self._stages = stages
        self._action = action
        self._has_failed = False
        self.step: Step | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        step, self.step = self.step, None
        if error is None:
            return
        transport = self._transport
        cause = transport.explain(error)
        failure = transport.fail(cause or describe_failure(error, transport.rank, self._action(), step))
        self.drop_gradients()
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        if isinstance(error, StepError) and str(error) == failure.message:
            return  # of a step in this one
        if cause is not None:  # this rank only noticed the effect
            raise step_error(failure) from None
        if isinstance(error, PenstockError) and failure.action is None and failure.rank == transport.rank:
            return  # a mistake in the call, which its own message explains best
        raise step_error(failure, traceback=failure.rank != transport.rank) from error

    def drop_gradients(self) -> None:
        """Drop the gradients, once: a pipeline built since may have added new ones."""
        if not self._has_failed:
            self._has_failed = True
            for stage in self._stages:
                stage.module.zero_grad(set_to_none=True)
                if stage.parallel is not None:
                    stage.parallel.drop_gradients()


def describe_failure(
    error: BaseException, rank: int, action: Action | None = None, step: Step | None = None
) -> Failure:
    """Describe an error on this rank for all ranks."""
    place = ""
    if action is not None:
        place = f" in {action} ({'; '.join([*map(_place, action.parts), *_operands(action, step)])})"
    return Failure(
        rank,
        f"rank {rank} failed{place}: {_said(error)}",
        action=str(action) if action else None,
        stage=action.parts[0].stage_index if action else None,
        microbatch=action.parts[0].microbatch_index if action else None,
        traceback="".join(traceback.format_exception(error)),
    )


def _place(part: Action) -> str:
    microbatch = "" if part.microbatch_index is None else f", microbatch {part.microbatch_index}"
    return f"stage {part.stage_index}{microbatch}"


def _said(error: BaseException) -> str:
    """Name an error, with its message if it has one."""
    kind = type(error).__name__
    try:
        message = str(error)
        if is_inplace_on_leaf(error):
            message += " Pass Stage(index, module, changes_inputs=True)"
    except Exception as another:  # it is not ours, and the other ranks must be notified in any case
        message = f"its message cannot be shown ({type(another).__name__})"
    return f"{kind}: {message}" if message else kind


def _operands(action: Action, step: Step | None) -> list[str]:
    """Describe the tensors that an action, or a part of it, works on."""
    if step is None or step.operands is None:
        return []
    part, value = step.operands
    tensors = _tensors(value)
    if part not in action.parts or not tensors:  # an error of another action, which a custom function has caught
        return []
    return [
        f"{'inputs' if part.computation_type is FORWARD else 'gradients'} {', '.join(map(describe_tensor, tensors))}"
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
