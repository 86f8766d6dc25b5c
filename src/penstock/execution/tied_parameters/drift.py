"""Notices when tied parameters come apart, e.g. because two optimizers treat them differently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import MetadataError, StageError
from penstock.execution.distributed_tensors import local_part
from penstock.execution.tied_parameters.digests import checksum
from penstock.execution.tied_parameters.exchange import swap_between_holders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.execution.tied_parameters.exchange import Exchange
    from penstock.execution.tied_parameters.holders import LocalTie


class DriftCheck:
    """Compares checksums of tied parameters in some steps: 1, 2, 4, 8, ... and every `every` steps.

    They travel with the gradients. Only where they differ are the values themselves compared: by rounding they may
    differ, as the same update on two kinds of devices does; by more than half of their digits they may not.
    """

    def __init__(self, ties: Sequence[LocalTie], every: int) -> None:
        self._ties = ties
        self._every = every
        self._step = 0
        self._mine: list[tuple[int, ...]] = []

    def begin(self) -> Sequence[tuple[int, ...]]:
        """Begin the check of a step; returns what to send: for each tie, a checksum of each holder if it is due."""
        self._step += 1
        self._mine = [()] * len(self._ties)
        if self._is_due():
            self._mine = [tuple(checksum(local_part(one.parameter)) for one in tie.holders) for tie in self._ties]
        return self._mine

    def finish(self, received: Sequence[Mapping[int, Any]], exchange: Exchange) -> None:
        """Compare with what the other ranks have sent, for each tie by rank; raise if a tie has come apart."""
        suspects = []
        for tie, mine, others in zip(self._ties, self._mine, received, strict=True):
            if any(not isinstance(theirs, tuple) or bool(theirs) != bool(mine) for theirs in others.values()):
                raise MetadataError(f"the ranks that hold {tie.tie} do not agree on which steps check it")
            if len({*mine, *(one for theirs in others.values() for one in theirs)}) > 1:
                suspects.append(tie)
        if suspects:
            self._compare_values(suspects, exchange)

    def _is_due(self) -> bool:
        step = self._step
        return self._every > 0 and (step % self._every == 0 or (step < self._every and step & (step - 1) == 0))

    def _compare_values(self, ties: Sequence[LocalTie], exchange: Exchange) -> None:
        values = [[local_part(one.parameter).detach() for one in tie.holders] for tie in ties]
        notes = [[value.contiguous() for value in each] for each in values]
        for tie, mine, others in zip(ties, values, swap_between_holders(ties, notes, exchange), strict=True):
            by_rank = {**others, exchange.rank: mine}
            first, *rest = [value.to(mine[0].device) for rank in tie.ranks for value in by_rank[rank]]
            difference, size = _largest_difference(first, rest)
            if not difference <= _digits(first) * size:
                raise StageError(self._describe(tie, difference, size), stage=tie.members[0].stage)

    def _describe(self, tie: LocalTie, difference: float, size: float) -> str:
        how = f"{tie.tie}, of size {size:.3g}, differ by {difference:.3g}"
        if self._step == 1:
            return (
                f"tied parameters begin with different values: {how}; build the model with one seed on all ranks, or "
                "load the same weights into all of them, before the first step"
            )
        steps = f"{self._step - 1} step{'' if self._step == 2 else 's'}"
        return (
            f"tied parameters have drifted apart: {how} after {steps}; give all holders the same optimizer settings "
            "and checkpoint, and update them after step() only"
        )


def _largest_difference(first: torch.Tensor, others: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Find by how much the others differ from the first at most, and how large that one is."""
    if first.numel() == 0:
        return 0.0, 0.0
    differences = [float((first - other).abs().nan_to_num(float("inf")).max()) for other in others]
    return max(differences, default=0.0), float(first.abs().max())


def _digits(tensor: torch.Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps ** 0.5)
