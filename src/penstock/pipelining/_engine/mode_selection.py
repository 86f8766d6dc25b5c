"""Selects the operations of a step, once when it begins: native ones where no program has overridden anything."""

from __future__ import annotations

from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.ir.actions import BACKWARD_INPUT, FULL_BACKWARD, OVERLAP_F_B
from penstock.pipelining._stage.compute import is_unmodified
from penstock.pipelining._stage.inference import StageInference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from penstock.ir.actions import ComputationType

#: What a stage does for its messages, and to compute.
_MESSAGES: Final = (
    "get_fwd_send_ops",
    "get_bwd_send_ops",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "_get_recv_ops",
    "_operation",
    "_resolve_peer_global_rank",
)
_COMPUTATIONS: Final = (
    "forward_maybe_with_nosync",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "backward_maybe_with_nosync",
)
#: These, and what else it does in a step.
_ALL: Final = (
    *_MESSAGES,
    *_COMPUTATIONS,
    "forward_one_chunk",
    "set_local_fwd_input",
    "set_local_bwd_input",
    "get_local_bwd_output",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "_check_chunk_id",
    "is_first",
    "is_last",
    "has_backward",
)

#: The actions in which a backward begins at the outputs.
_AT_OUTPUTS: Final = frozenset({FULL_BACKWARD, BACKWARD_INPUT, OVERLAP_F_B})


class Mode(IntEnum):
    """Which operations a step runs.

    Attributes:
        METHODS: those of the stages and the schedule, through every method and function that a program may replace.
        DIRECT: the same, but messages are posted without operations that describe them.
        NATIVE: the native operations.
    """

    METHODS = 0
    DIRECT = 1
    NATIVE = 2


def select_mode(stages: Sequence[Any], names: Any, *, is_plain: bool) -> Mode:
    """Find which operations a step can run, as far as its stages and the schedule have a say in it.

    Args:
        stages: the stages of the rank.
        names: the module with upstream's path.
        is_plain: whether the schedule itself does what is written here, and nothing else.
    """
    if not _is_unobserved(names):
        return Mode.METHODS
    if is_plain and all(map(_is_plain, stages)):
        return Mode.NATIVE
    return Mode.DIRECT if _sends_as_written(stages) else Mode.METHODS


def _is_unobserved(names: Any) -> bool:
    return (
        names._is_unpatched()
        and not torch._C._autograd._profiler_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _sends_as_written(stages: Sequence[Any]) -> bool:
    return all(is_unmodified(stage, *_MESSAGES) for stage in stages)


def _is_plain(stage: Any) -> bool:
    """Whether nothing of a stage is replaced that a step uses, and its module is not shared."""
    return (
        isinstance(stage, StageInference)  # which knows what goes between stages
        and is_unmodified(stage, *_ALL)
        and _makes_weights_itself(stage)
        and not stage._runtime_validate
        and not stage._has_own_buffers
    )


@contextmanager
def step_scope(
    stages: Sequence[Any], customs: Collection[ComputationType], known: Mode = Mode.METHODS
) -> Iterator[None]:
    """Wrap a step in which functions of the user run in place of actions of these types.

    If there are none, stages that compute as written here (which they do where the shortest way is known to be right)
    need not look again. If there is one for backwards, outputs stay where it may look for them.
    """
    plain = [] if customs else [stage for stage in stages if known is Mode.NATIVE or _computes_as_written(stage)]
    watched = stages if _AT_OUTPUTS.intersection(customs) else []
    for stage in plain:
        stage._is_plain = True
    for stage in watched:
        stage._is_watched = True
    try:
        yield
    finally:
        for stage in plain:
            stage._is_plain = False
        for stage in watched:
            stage._is_watched = False
        for stage in stages:  # the group may end before the next step; a stand-in may have no channel
            if (channel := getattr(stage, "_channel", None)) is not None:
                channel.close()


def _computes_as_written(stage: Any) -> bool:
    return is_unmodified(stage, *_COMPUTATIONS) and _makes_weights_itself(stage)


def _makes_weights_itself(stage: Any) -> bool:
    return stage.dw_builder is None and stage._parallel is None
