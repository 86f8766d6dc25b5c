"""Gradients are divided once: not those of earlier steps again, nor twice where stages share a weight."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from penstock.pipelining._stage.compute import is_as_written, of_one_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def divided_once(stages: Sequence[Any], factor: int) -> Iterator[None]:
    """Around a step after which these stages, in this order, divide the gradients of their modules by a factor.

    What earlier steps have left is divided already, which is made up for. A weight of several stages is divided by the
    last of them: before, not all of its gradients are there.
    """
    stages = [stage for stage in stages if factor != 1 and _divides(stage)]
    known: dict[int, torch.nn.Parameter] = {}
    for stage in reversed(stages):
        mine = {id(parameter): parameter for parameter in stage.submod.parameters()}
        stage._divided_later = mine.keys() & known.keys()
        stage._is_divided = False
        known |= mine
    _multiply([parameter.grad for parameter in known.values() if parameter.grad is not None], factor)
    try:
        yield
    finally:
        for stage in stages:
            if not stage._is_divided:  # the step has failed before
                stage.scale_grads(factor)
            stage._divided_later = ()


def _multiply(gradients: Sequence[torch.Tensor], factor: int) -> None:
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # as no_grad does, which takes as long as a small product
    try:
        for alike in of_one_kind(gradients):
            torch._foreach_mul_(alike, factor)
    finally:
        torch._C._set_grad_enabled(enabled)


def _divides(stage: Any) -> bool:
    """Whether a stage divides the gradients of its module: one that has its own way of it may not."""
    return is_as_written(stage, "scale_grads", "perform_reduce_grad") and isinstance(stage.submod, torch.nn.Module)
