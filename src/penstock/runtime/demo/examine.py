"""Compares the gradients of a pipeline with those of the unsplit model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from penstock.runtime.demo.events import report
from penstock.runtime.demo.model import loss_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from penstock.runtime.pipeline import Pipeline

#: How much gradients may differ, relative to the largest: both are sums of float32 numbers, in different order.
TOLERANCE = 1e-4


def compare_gradients(pipe: Pipeline, unsplit: nn.Module, tokens: Tensor, target: Tensor) -> bool:
    """Compare the gradients of this batch on all ranks; the rank of the last stage reports whether they are right."""
    torch.autograd.backward(loss_of(unsplit(tokens), target))
    found = differences(dict(pipe.named_parameters()), dict(unsplit.named_parameters()))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    difference, largest = found.tolist()
    right = bool(difference <= TOLERANCE * largest)
    if pipe.has_last:
        report("gradients", difference=difference, largest=largest, tolerance=TOLERANCE, right=right)
    return right


def differences(split: Mapping[str, Tensor], unsplit: Mapping[str, Tensor]) -> Tensor:
    """The largest difference between two gradients of a parameter, and the largest gradient."""
    found = torch.zeros(2, dtype=torch.float64)
    for name, weight in split.items():
        expected = unsplit[name].grad
        if weight.grad is None or expected is None:
            found[0] = torch.inf
            continue
        difference = (weight.grad.double() - expected.double()).abs().max().nan_to_num(torch.inf)
        found = torch.maximum(found, torch.stack([difference, expected.double().abs().max()]))
    return found
