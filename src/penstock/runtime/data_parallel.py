"""Stages whose parameters are shared with other replicas of the pipeline."""

from __future__ import annotations

from typing import Protocol


class DataParallel(Protocol):
    """What the runtime asks of a module that is replicated or sharded."""

    def unshard(self) -> None:
        """UNSHARD: bring the parameters together."""

    def reshard(self) -> None:
        """RESHARD: keep only this replica's part of them."""

    def reduce(self) -> None:
        """REDUCE_GRAD: all backwards of the step are done; share the gradients."""
