"""Finds the weight of each microbatch's loss in that of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from penstock.errors import MicrobatchError, StageError

MEAN: Final = "mean"
SUM: Final = "sum"
WEIGHTED: Final = "weighted"

#: How much a microbatch counts, by its target: e.g. the number of tokens that are not padding.
Weight = Callable[[Any], Any]


def check_reduction(reduction: str, weight: Weight | None) -> None:
    """Refuse an unknown reduction."""
    if reduction not in (MEAN, SUM, WEIGHTED):
        raise StageError(f"loss_reduction must be 'mean', 'sum' or 'weighted', not {reduction!r}")
    if (reduction == WEIGHTED) != (weight is not None):
        raise StageError(
            "loss_reduction='weighted' and loss_weight go together; pass both, e.g. "
            "loss_weight=lambda target: (target != pad).sum()"
        )


def find_shares(
    reduction: str,
    targets: Sequence[Any],
    counts: Sequence[int] | None,
    weight: Weight | None = None,
    *,
    may_be_empty: bool = False,
) -> list[float]:
    """Find the factor of each microbatch's loss in the loss of the batch.

    With ``"mean"`` the loss function is a mean over samples; microbatches count by how many they have. With ``"sum"``
    it is a sum. With ``"weighted"`` it is a mean over what ``weight(target)`` counts, e.g. tokens.

    Args:
        reduction: which of these.
        targets: that of each microbatch.
        counts: how many samples each has, if that is known.
        weight: for ``"weighted"``.
        may_be_empty: whether nothing may count, e.g. no token; then microbatches count equally.

    >>> import torch
    >>> find_shares("mean", [torch.ones(3), torch.ones(1)], [3, 1])
    [0.75, 0.25]
    >>> find_shares("weighted", [torch.ones(3), torch.ones(2)], None, weight=lambda target: target.numel() - 1)
    [0.6666666666666666, 0.3333333333333333]
    """
    if reduction == SUM:
        return [1.0] * len(targets)
    if weight is not None:
        return _normalized([float(weight(target)) for target in targets], may_be_empty=may_be_empty)
    if counts is None:
        raise MicrobatchError(
            "loss_reduction='mean' needs the number of samples of each microbatch, but nothing on the last stage's "
            "rank shows it; pass target= there, or use loss_reduction='weighted' with loss_weight=lambda _: 1 if all "
            "microbatches are equal",
            name="target",
        )
    return _normalized(list(counts), may_be_empty=may_be_empty)


def combine_losses(losses: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Compute the loss of the batch from those of its microbatches, in their element type.

    A microbatch in which nothing counts is left out: its loss is NaN, as a mean over nothing.

    >>> combine_losses([torch.tensor(2.0), torch.tensor(4.0), torch.tensor(float("nan"))], [0.75, 0.25, 0.0])
    tensor(2.5000)
    """
    kind = losses[0].dtype
    precise = torch.promote_types(kind, torch.float32)
    counted = [loss.reshape(()).to(precise) * share for loss, share in zip(losses, shares, strict=True) if share > 0]
    return torch.stack(counted).sum().to(kind)


def _normalized(counts: Sequence[float], *, may_be_empty: bool) -> list[float]:
    total = math.fsum(counts)
    if may_be_empty and counts and not any(counts):
        return [1 / len(counts)] * len(counts)
    if not all(math.isfinite(count) and count >= 0 for count in counts) or total <= 0:
        raise MicrobatchError(
            f"the weights of the microbatches must be non-negative numbers with a positive sum, not {counts}"
        )
    return [count / total for count in counts]
