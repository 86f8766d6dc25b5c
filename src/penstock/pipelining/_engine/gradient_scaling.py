"""Gradients of a step are scaled once: not those of earlier steps again, nor twice where stages share a weight."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.autograd import is_lazy
from penstock.pipelining._stage.compute import is_unmodified
from penstock.pipelining._stage.gradients import of_one_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@contextmanager
def scaled_once(stages: Sequence[Any], factor: int) -> Iterator[None]:
    """Wrap a step after which these stages, in this order, divide the gradients of their modules by a factor.

    What earlier steps have left is divided already: it is set aside while the step runs, and added back after. A weight
    of several stages is divided by the last of them: before, not all of its gradients are there.
    """
    stages = [stage for stage in stages if factor != 1 and _divides(stage)]
    known: dict[int, torch.nn.Parameter] = {}
    for stage in reversed(stages):
        mine = {id(parameter): parameter for parameter in stage.submod.parameters()}
        stage._divided_later = mine.keys() & known.keys()
        stage._is_divided = False
        known |= mine
    earlier = _set_aside(known.values())
    try:
        yield
    finally:
        for stage in stages:
            if not stage._is_divided:  # the step has failed before
                stage.scale_grads(factor)
            stage._divided_later = ()
        _add_back(earlier)


def _set_aside(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Copy gradients, and leave zeros in their place.

    ``.grad`` stays the tensor that it is: it may be part of a bucket, or of memory that the program knows.
    """
    earlier: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    places: list[torch.Tensor] = []
    with torch.no_grad():
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if is_lazy(gradient):
                gradient = parameter.grad = gradient.clone()
            places.append(gradient)
            earlier.append((parameter, gradient.clone()))
        for alike in of_one_kind(places):
            torch._foreach_zero_(alike)
    return earlier


def _add_back(earlier: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    sums: dict[type, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for parameter, gradient in earlier:
        if parameter.grad is None:  # a hook of the program has taken it
            parameter.grad = gradient
        elif is_lazy(parameter.grad):  # or has set another one
            parameter.grad = parameter.grad + gradient
        else:
            totals, addends = sums.setdefault(type(gradient), ([], []))
            totals.append(parameter.grad)
            addends.append(gradient)
    with torch.no_grad():
        for totals, addends in sums.values():
            torch._foreach_add_(totals, addends)


def _divides(stage: Any) -> bool:
    """Whether a stage divides the gradients of its module: one that has its own way of it may not."""
    return is_unmodified(stage, "scale_grads", "perform_reduce_grad") and isinstance(stage.submod, torch.nn.Module)
