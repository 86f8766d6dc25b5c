"""Short ways through a step, where nobody has put anything of their own between: found out once, when it begins."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.ir.actions import BACKWARD_INPUT, FULL_BACKWARD
from penstock.pipelining._stage_compute import StageCompute
from penstock.pipelining._stage_parallel import NotShared

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

#: The backwards that begin at the outputs.
_BACKWARDS: Final = frozenset({FULL_BACKWARD, BACKWARD_INPUT})


def begins_directly(stages: Sequence[Any], names: Any) -> bool:
    """Whether messages may begin without an operation object that describes them.

    Not if a stage makes operations of its own, if ``names``, the module with upstream's path, has other functions than
    it came with, or if a profiler or a log is to show what they do.
    """
    return (
        names._begins_as_ever()
        and not torch._C._autograd._profiler_enabled()
        and all(_is_as_written(stage, _MESSAGES) for stage in stages)
    )


@contextmanager
def prepared(stages: Sequence[Any], customs: Collection[ComputationType]) -> Iterator[None]:
    """Around a step in which functions of the user run in place of actions of these types.

    If there are none, stages that compute as written here need not look again. If there is one for backwards, outputs
    stay where it may look for them.
    """
    plain = [] if customs else [stage for stage in stages if _computes_as_written(stage)]
    watched = stages if _BACKWARDS.intersection(customs) else []
    for stage in plain:
        stage._is_plain = True
        stage._weights_of_step = list(stage.submod.parameters()) if isinstance(stage.submod, torch.nn.Module) else None
    for stage in watched:
        stage._is_watched = True
    try:
        yield
    finally:
        for stage in plain:
            stage._is_plain = False
            stage._weights_of_step = None
        for stage in watched:
            stage._is_watched = False


def _computes_as_written(stage: Any) -> bool:
    return _is_as_written(stage, _COMPUTATIONS) and stage.dw_builder is None and type(stage._parallel) is NotShared


def _is_as_written(stage: Any, methods: Sequence[str]) -> bool:
    """Whether neither the class of a stage nor the stage itself has another method in place of one of these."""
    kind = type(stage)
    if not issubclass(kind, StageCompute):
        return False
    own = vars(stage)
    return all(name not in own and getattr(kind, name) is getattr(StageCompute, name) for name in methods)
