"""Short ways through a step, where nobody has put anything of their own between: found out once, when it begins."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.pipelining._stage_compute import StageCompute
from penstock.pipelining._stage_parallel import NotShared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
def plainly(stages: Sequence[Any]) -> Iterator[None]:
    """Around a step without functions of the user: stages that compute as written here need not look again."""
    plain = [
        stage
        for stage in stages
        if _is_as_written(stage, _COMPUTATIONS) and stage.dw_builder is None and type(stage._parallel) is NotShared
    ]
    for stage in plain:
        stage._is_plain = True
        stage._weights_of_step = list(stage.submod.parameters()) if isinstance(stage.submod, torch.nn.Module) else None
    try:
        yield
    finally:
        for stage in plain:
            stage._is_plain = False
            stage._weights_of_step = None


def _is_as_written(stage: Any, methods: Sequence[str]) -> bool:
    """Whether neither the class of a stage nor the stage itself has another method in place of one of these."""
    kind = type(stage)
    if not issubclass(kind, StageCompute):
        return False
    own = vars(stage)
    return all(name not in own and getattr(kind, name) is getattr(StageCompute, name) for name in methods)
