"""Runs stages whose parameters are shared with other replicas of the pipeline.

A wrapper for data parallelism reduces gradients in the backward; in a pipeline a stage has many backwards, and only
their sum must be reduced. So during a step the wrappers do not reduce gradients; they are reduced by
REDUCE_GRAD, or at the end of the step for a stage whose schedule has none:

- ``DistributedDataParallel`` and the composable ``replicate`` around it: gradients are averaged in a few flat buckets.
- ``fully_shard``, and the ``replicate`` built on it: their own reduction runs once, for all backwards.
  Parameters are gathered by UNSHARD and released by RESHARD, not by each forward and backward; where a schedule
  has neither, the first forward gathers them and they are released when the step ends.

Reductions overlap with the actions that follow. Gradients are complete when the step ends.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError
from penstock.execution.data_parallel.ddp import DdpAdapter
from penstock.execution.data_parallel.fsdp import FsdpAdapter
from penstock.ir import packed
from penstock.ir.actions import REDUCE_GRAD

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    import torch

    from penstock.execution.stage import Stage
    from penstock.ir.schedule import Schedule


class DataParallel(Protocol):
    """Adapts a replicated or sharded module to steps of many backwards."""

    def begin(self) -> None:
        """Begin a step: no gradient is reduced until ``reduce``."""

    def unshard(self) -> None:
        """UNSHARD: start to gather the parameters. The gather may still be in flight when this returns."""

    def reshard(self) -> None:
        """RESHARD: keep only this replica's shard of the parameters."""

    def weight_backward(self, run: Callable[[], None]) -> None:
        """Run W with the parameters gathered. The module's hooks do not see it."""

    def own_gradients(self) -> None:
        """Give gradients of parameters that the module does not expose their own memory, after a backward."""

    def reduce(self) -> None:
        """REDUCE_GRAD, after all backwards of the step: start to reduce the gradients, unless already begun."""

    def finish(self) -> None:
        """Finish a step: return when gradients are complete and parameters are as before it."""

    def end(self) -> None:
        """Restore the module's own behaviour after a step, even a failed one."""


def adapter_for(module: torch.nn.Module, stage: int | None = None) -> DataParallel | None:
    """Find the adapter for a module that shares parameters with other replicas; None if it shares none.

    >>> import torch
    >>> adapter_for(torch.nn.Linear(2, 2)) is None
    True
    """
    sharded = _modules_of(module, "torch.distributed.fsdp", "FSDPModule")
    replicated = _modules_of(module, "torch.distributed._composable.replicate", "DDP")
    wrapped = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    if sharded and (replicated or wrapped):
        raise StageError(
            "a stage mixes fully_shard and DistributedDataParallel modules; use one of them for the whole stage",
            stage=stage,
        )
    if sharded:
        return FsdpAdapter(sharded)
    if replicated or wrapped:
        return DdpAdapter([*wrapped, *replicated])
    return None


def gradient_sharing(
    stages: Iterable[Stage], *, reduce: bool, elsewhere: Container[int] = ()
) -> AbstractContextManager[None]:
    """Wrap a step: nothing is reduced too early, and with `reduce` all gradients are reduced when it ends.

    Args:
        stages: the stages of this rank.
        reduce: whether to reduce gradients.
        elsewhere: the stages whose gradients a user's function for REDUCE_GRAD reduces.
    """
    shared = [(stage.index, stage.parallel) for stage in stages if stage.parallel is not None]
    return _gradient_sharing(shared, reduce=reduce, elsewhere=elsewhere) if shared else nullcontext()


@contextmanager
def _gradient_sharing(
    shared: Sequence[tuple[int, DataParallel]], *, reduce: bool, elsewhere: Container[int]
) -> Iterator[None]:
    adapters = [adapter for _, adapter in shared]
    try:
        for adapter in adapters:
            adapter.begin()
        yield
        for index, adapter in shared:
            if reduce and index not in elsewhere:
                adapter.reduce()
        for adapter in adapters:
            adapter.finish()
    finally:
        for adapter in adapters:
            adapter.end()


def reductions_of(schedule: Schedule) -> frozenset[int]:
    """Find the stages that have a REDUCE_GRAD in a schedule. O(n).

    >>> import penstock as ps
    >>> schedule = ps.build("1F1B", ranks=2, microbatches=4)
    >>> sorted(reductions_of(ps.lower(schedule))), sorted(reductions_of(ps.lower(schedule, reduce=False)))
    ([0, 1], [])
    """
    codes = schedule.codes
    return frozenset(packed.stages(codes[packed.types(codes) == packed.TYPE_NUMBER[REDUCE_GRAD]]).tolist())


def _modules_of(module: torch.nn.Module, home: str, name: str) -> list[Any]:
    """Find the modules of one of torch's types. None exist if the type has not been imported."""
    kind = getattr(sys.modules.get(home), name, None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]
