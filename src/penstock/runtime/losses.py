"""What the loss of each microbatch counts for in that of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.errors import MicrobatchError, StageError
from penstock.runtime.microbatches import samples

MEAN: Final = "mean"
SUM: Final = "sum"
WEIGHTED: Final = "weighted"

#: How much a microbatch counts, by its target: e.g. the number of tokens that are not padding.
Weight = Callable[[Any], Any]


def check_reduction(reduction: str, weight: Weight | None) -> None:
    """Refuse a reduction that there is not."""
    if reduction not in (MEAN, SUM, WEIGHTED):
        raise StageError(f"loss_reduction is 'mean', 'sum' or 'weighted', not {reduction!r}")
    if (reduction == WEIGHTED) != (weight is not None):
        raise StageError(
            "loss_reduction='weighted' and loss_weight go together: loss_weight=lambda target: (target != pad).sum()"
        )


def shares(reduction: str, targets: Sequence[Any], spec: Any = None, weight: Weight | None = None) -> list[float]:
    """What the loss of each microbatch is multiplied by in the loss of the batch.

    With ``"mean"`` the loss function is a mean over samples; microbatches count by how many they have. With ``"sum"``
    it is a sum. With ``"weighted"`` it is a mean over whatever ``weight(target)`` counts, e.g. tokens.

    >>> import torch
    >>> shares("mean", [torch.ones(3), torch.ones(1)])
    [0.75, 0.25]
    >>> shares("weighted", [torch.ones(3), torch.ones(2)], weight=lambda target: target.numel() - 1)
    [0.6666666666666666, 0.3333333333333333]
    """
    if reduction == SUM:
        return [1.0] * len(targets)
    counts = samples(targets, spec) if weight is None else [float(weight(target)) for target in targets]
    total = math.fsum(counts)
    if not all(math.isfinite(count) and count >= 0 for count in counts) or total <= 0:
        raise MicrobatchError(
            f"the weights of the microbatches must be numbers from 0 with a positive sum, not {counts}"
        )
    return [count / total for count in counts]
