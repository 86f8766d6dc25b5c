"""Runs stages whose parameters are shared with other replicas of the pipeline.

A wrapper for data parallelism reduces gradients in every backward. A stage has one backward per microbatch, and only
their sum must be reduced, so an adapter keeps the wrapper from reducing until the last one has run:

- ``DistributedDataParallel`` and the composable ``replicate`` around it: gradients are averaged in a few flat buckets.
- ``fully_shard``, and the ``replicate`` built on it: their own reduction runs once, for all backwards.

Both front doors use the same adapters. Under ``runtime`` the schedule decides: REDUCE_GRAD starts a reduction, or the
end of the step where a schedule has none; it overlaps with the actions that follow, and gradients are complete when the
step ends. UNSHARD gathers the parameters of ``fully_shard`` and RESHARD releases them, not each forward and backward;
where a schedule has neither, the first forward gathers them and they are released when the step ends. Under
``pipelining`` the methods of the stages decide, as in torch's package.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError
from penstock.execution.data_parallel.ddp import DdpAdapter, DdpReducerAdapter
from penstock.execution.data_parallel.fsdp import FsdpAdapter, FsdpPartsAdapter
from penstock.ir import packed
from penstock.ir.actions import REDUCE_GRAD

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from penstock.execution.data_parallel.adapter import DataParallel
    from penstock.execution.stage import Stage
    from penstock.ir.schedule import Schedule


def adapter_for(
    module: Any, stage: int | None = None, *, reduce_in: Literal["reduce_action", "last_backward"] = "reduce_action"
) -> DataParallel | None:
    """Find the adapter for a module that shares parameters with other replicas; None if it shares none.

    Args:
        module: the module of a stage, or a stand-in for one.
        stage: the index of the stage, for errors.
        reduce_in: what decides when gradients are reduced and parameters are gathered. ``reduce_action``: the
            actions of the schedule. ``last_backward``: as in torch's package. The last backward of a step averages the
            gradients of ``DistributedDataParallel``; ``fully_shard`` gathers parameters as the user asked for, and
            reduces in every backward if it is not around the whole stage.

    >>> import torch
    >>> adapter_for(torch.nn.Linear(2, 2)) is None
    True
    """
    return _adapter_for_actions(module, stage) if reduce_in == "reduce_action" else _adapter_for_backwards(module)


def _adapter_for_actions(module: torch.nn.Module, stage: int | None) -> DataParallel | None:
    sharded, replicated = _fsdp_modules(module), _ddp_modules(module)
    if sharded and replicated:
        raise StageError(
            "a stage mixes fully_shard and DistributedDataParallel modules; use one of them for the whole stage",
            stage=stage,
        )
    if sharded:
        return FsdpAdapter(sharded, reshard_after_forward="schedule")
    return DdpAdapter(replicated, reduce_in="reduce_action") if replicated else None


def _adapter_for_backwards(module: Any) -> DataParallel | None:
    if isinstance(module, DistributedDataParallel):
        return DdpReducerAdapter(module)
    if not isinstance(module, torch.nn.Module):
        return None
    sharded = _fsdp_modules(module)
    if sharded and sharded[0] is module:  # modules() begins with the module itself
        return FsdpAdapter(sharded, reshard_after_forward="user")
    if sharded:
        return FsdpPartsAdapter(sharded)
    replicated = _ddp_modules(module)
    return DdpAdapter(replicated, reduce_in="last_backward") if replicated else None


def reduction_scope(
    stages: Iterable[Stage], *, reduce: bool, elsewhere: Container[int] = ()
) -> AbstractContextManager[None]:
    """Wrap a step: nothing is reduced too early, and with `reduce` all gradients are reduced when it ends.

    Args:
        stages: the stages of this rank.
        reduce: whether to reduce gradients.
        elsewhere: the stages whose gradients a user's function for REDUCE_GRAD reduces.
    """
    shared = [(stage.index, stage.parallel) for stage in stages if stage.parallel is not None]
    return _reduction_scope(shared, reduce=reduce, elsewhere=elsewhere) if shared else nullcontext()


@contextmanager
def _reduction_scope(
    shared: Sequence[tuple[int, DataParallel]], *, reduce: bool, elsewhere: Container[int]
) -> Iterator[None]:
    adapters = [adapter for _, adapter in shared]
    try:
        for adapter in adapters:
            adapter.begin_step()
        yield
        for index, adapter in shared:
            if reduce and index not in elsewhere:
                adapter.reduce()
        # Stages may share a parameter: the average that was started last has all of its gradient, and must be the last.
        for adapter in sorted(adapters, key=lambda adapter: adapter.reduction):
            adapter.finish_step()
    finally:
        for adapter in adapters:
            adapter.end_step()


def reductions_of(schedule: Schedule) -> frozenset[int]:
    """Find the stages that have a REDUCE_GRAD in a schedule. O(n).

    >>> import penstock as ps
    >>> schedule = ps.build("1F1B", ranks=2, microbatches=4)
    >>> sorted(reductions_of(ps.lower(schedule))), sorted(reductions_of(ps.lower(schedule, reduce=False)))
    ([0, 1], [])
    """
    codes = schedule.codes
    return frozenset(packed.stages(codes[packed.types(codes) == packed.TYPE_NUMBER[REDUCE_GRAD]]).tolist())


def _ddp_modules(module: torch.nn.Module) -> list[Any]:
    wrapped = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    return [*wrapped, *_modules_of(module, "torch.distributed._composable.replicate", "DDP")]


def _fsdp_modules(module: torch.nn.Module) -> list[Any]:
    return _modules_of(module, "torch.distributed.fsdp", "FSDPModule")


def _modules_of(module: torch.nn.Module, home: str, name: str) -> list[Any]:
    """Find the modules of one of torch's types. None exist if the type has not been imported."""
    kind = getattr(sys.modules.get(home), name, None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]
