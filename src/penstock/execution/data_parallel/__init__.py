"""Stages whose parameters are shared with other replicas of the pipeline.

A wrapper for data parallelism shares gradients in the backward; in a pipeline a stage has many backwards, and only the
sum of them is to be shared. So in a step the wrappers are told to leave gradients alone, and the sharing is done by
REDUCE_GRAD, or at the end of the step for a stage whose schedule has none:

- ``DistributedDataParallel`` and the composable ``replicate`` around it: gradients are averaged in a few flat buckets.
- ``fully_shard``, and the ``replicate`` that is made of it: their own reduction runs, for all backwards at once.
  Parameters are brought together by UNSHARD and released by RESHARD, not by each forward and backward; where a schedule
  has neither, the first forward brings them together and they are released when the step ends.

Reductions run beside whatever comes next in the schedule. Gradients are complete when the step ends.
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
    """What the runtime asks of a module that is replicated or sharded."""

    def begin(self) -> None:
        """A step begins: until ``reduce`` no gradient is shared."""

    def unshard(self) -> None:
        """UNSHARD: bring the parameters together. It may still be under way when this returns."""

    def reshard(self) -> None:
        """RESHARD: keep only this replica's part of them."""

    def weight_backward(self, run: Callable[[], None]) -> None:
        """W: run it, with the parameters at hand. The hooks of the module do not see it."""

    def own_gradients(self) -> None:
        """A backward has run: gradients of parameters that the module itself does not show have memory of their own."""

    def reduce(self) -> None:
        """REDUCE_GRAD: all backwards of the step are done; share the gradients, if that has not begun in this step."""

    def finish(self) -> None:
        """The step has been run: return when gradients are complete and parameters are as before the step."""

    def end(self) -> None:
        """The step is over, also if it has failed: the module is on its own again."""


def adapter_for(module: torch.nn.Module, stage: int | None = None) -> DataParallel | None:
    """What shares the parameters of a module, or of modules in it, with other replicas; None if nothing does.

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
    """Around a step: nothing is shared too early, and with `reduce` all gradients are when it ends.

    Args:
        stages: the stages of this rank.
        reduce: whether gradients are to be shared.
        elsewhere: the stages whose gradients are left to someone else: to a user's function for REDUCE_GRAD.
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
    """The stages that have a REDUCE_GRAD in a schedule. O(n).

    >>> import penstock as ps
    >>> schedule = ps.build("1F1B", ranks=2, microbatches=4)
    >>> sorted(reductions_of(ps.lower(schedule))), sorted(reductions_of(ps.lower(schedule, reduce=False)))
    ([0, 1], [])
    """
    codes = schedule.codes
    return frozenset(packed.stages(codes[packed.types(codes) == packed.TYPE_NUMBER[REDUCE_GRAD]]).tolist())


def _modules_of(module: torch.nn.Module, home: str, name: str) -> list[Any]:
    """The modules that are of a type of torch. Where the type has not been imported, there are none."""
    kind = getattr(sys.modules.get(home), name, None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]
