"""The module path of ``torch.distributed.pipelining.schedules``: its names, from the files that they live in.

Orders come from ``penstock.schedules``, passes from ``penstock.lowering``; what a step does is compiled once into a
program (``execution/program.py``). Names that programs replace here, such as ``_batch_p2p``, are looked up here when
they are used.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
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
from penstock.pipelining._schedule.actions import (
    _Action,
    _action_regex,
    _ComputationType,
    _get_profiler_function_name,
)
from penstock.pipelining._schedule.base import _PipelineSchedule
from penstock.pipelining._schedule.multi import PipelineScheduleMulti
from penstock.pipelining._schedule.named import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _check_torch_compile_compatibility,
)
from penstock.pipelining._schedule.orders import _get_1f1b_rank_ops, _get_warmup_ops
from penstock.pipelining._schedule.passes import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _defer_recv_ops,
    _merge_bw,
    _requires_reduce_grad,
)
from penstock.pipelining._schedule.runtime import _CustomFunctionProtocol, _PipelineContext, _PipelineScheduleRuntime
from penstock.pipelining._schedule.single import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    _ScheduleForwardOnly,
)
from penstock.pipelining._schedule.text import _dump_chrometrace, _format_pipeline_order, _simulate_comms_compute
from penstock.pipelining._schedule.validation import _validate_schedule
from penstock.pipelining._utils import InferenceMode, generate_rank_to_stage_mapping, generate_stage_to_rank_mapping
from penstock.pipelining.microbatch import TensorChunkSpec, _split_tensor, merge_chunks, split_args_kwargs_into_chunks
from penstock.pipelining.stage import PipelineStage, _PipelineStageBase, _RecvInfo

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

#: Targets are split along the batch.
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The class of a schedule by its name; case does not matter.

    >>> get_schedule_class("1f1b").__name__
    'Schedule1F1B'
    """
    found = {name.lower(): kind for name, kind in _CLASSES.items()}.get(schedule_name.lower())
    if found is None:
        raise ValueError(f"unknown schedule {schedule_name!r}; use one of {', '.join(_CLASSES)}")
    return found


_CLASSES: dict[str, type[Any]] = {
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


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Post sends or receives one by one, or both together in one batch.

    Coalesced operations wait in line on one stream, where independent ones could overlap. Sends and receives of one
    call are still coalesced, where the backend can, so that two ranks do not both wait to send.
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
    return dist.batch_isend_irecv(p2p_ops)


def _is_unpatched() -> bool:
    """Whether messages are posted as written in this file, and no logger or patch observes them."""
    return _functions_of_messages() == _SHIPPED and not logger.isEnabledFor(logging.DEBUG)


def _functions_of_messages() -> tuple[Any, ...]:
    ours = _batch_p2p, _sorted_batch_p2p, _wait_batch_p2p
    return (*ours, dist.isend, dist.irecv, dist.batch_isend_irecv, dist.P2POp)


def _begun(message: dist.P2POp, side: str) -> Any:
    """What ``dist.isend`` or ``dist.irecv`` returns for a message, whose group and peer are known already."""
    return message.op(message.tensor, group=message.group, tag=message.tag, **{side: message.group_peer})


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


_SHIPPED = _functions_of_messages()
