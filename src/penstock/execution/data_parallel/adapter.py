"""The protocol between a stage and what shares its parameters with other replicas of the pipeline."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

T = TypeVar("T")
#: All of a backward, the gradients of the inputs (I), or those of the weights (W).
BackwardKind = Literal["full", "input", "weight"]


class DataParallel:
    """Adapts a replicated or sharded module to steps of many backwards. This base class leaves the module to itself.

    Attributes:
        splits_backward: whether a backward can run in two halves; if not, all of it runs with the gradients of inputs.
        keeps_outputs: whether outputs are needed as tensors until the backward.
        reduction: the number of the last reduction that was started, of all in this process.
        gradients_in_buckets: whether the backward that is running makes gradients parts of a bucket, where they must
            stay; otherwise the stage gives each gradient memory of its own.
    """

    splits_backward = True
    keeps_outputs = False
    gradients_in_buckets = False
    reduction = 0

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that hold replicas, or shards, of the parameters."""
        return ()

    def begin_step(self) -> None:
        """Begin a step: no gradient is reduced until ``reduce``."""

    def forward(self) -> AbstractContextManager[Any]:
        """Wrap a forward, or a dry run."""
        return nullcontext()

    def run_backward(self, kind: BackwardKind, run: Callable[[], T], *, outputs: Any = None, last: bool = False) -> T:  # noqa: ARG002
        """Run a backward.

        Args:
            kind: which part of a backward it is.
            run: what runs it.
            outputs: where a full one begins, if ``keeps_outputs``.
            last: whether it is the last one of the step, as far as the caller knows.
        """
        return run()

    def unshard(self) -> None:
        """Run UNSHARD: start to gather the parameters. They may still be in flight when this returns."""

    def reshard(self) -> None:
        """Run RESHARD: keep only this replica's shard of the parameters."""

    def reduce(self) -> None:
        """Run REDUCE_GRAD: start to reduce the gradients after all backwards, unless this step has already."""

    def finish_step(self) -> None:
        """Return when gradients are complete and parameters are as they were before the step."""

    def end_step(self) -> None:
        """Restore the module's own behaviour after a step, even a failed one."""

    def drop_gradients(self) -> None:
        """Drop what a failed step left in places that ``zero_grad`` does not reach."""
