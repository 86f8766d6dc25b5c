"""Finds where a backward of a stage begins, and the gradients that it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from penstock.execution.autograd import needs_gradient, pop_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Gradients = tuple[torch.Tensor | None, ...]


def of_one_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by their type: one operation on many does not take DTensors together with others."""
    kinds: dict[type, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(type(tensor), []).append(tensor)
    return list(kinds.values())


def find_roots(outputs: Any, gradients: Any, of_any_size: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Find where a backward begins, and with what. A loss begins with ones.

    An output without a gradient is one that the next stage has no use for. ``of_any_size`` allows a loss of several
    numbers.
    """
    if isinstance(outputs, torch.Tensor):
        if not outputs.requires_grad:
            return [], []
        if gradients is None:
            if outputs.numel() != 1 and not of_any_size:
                raise unseeded(outputs)
            gradients = torch.ones_like(outputs)
        return [outputs], [gradients]
    outputs = outputs or ()
    if gradients is None:
        gradients = [torch.ones_like(one) if needs_gradient(one) else None for one in outputs if of_any_size]
    roots, known = [], []
    for output, gradient in zip(outputs, gradients, strict=bool(gradients)):
        if gradient is not None and is_root(output):
            roots.append(output)
            known.append(gradient)
    return roots, known


def unseeded(loss: torch.Tensor) -> RuntimeError:
    """Describe a loss at which no backward can begin."""
    return RuntimeError(f"the loss must be one number, not a tensor of shape {tuple(loss.shape)}")


def is_root(value: Any) -> bool:
    """Whether a backward can begin at a value."""
    return isinstance(value, GradientEdge) or needs_gradient(value)


def pop_input_gradients(inputs: Sequence[Any]) -> Gradients:
    """Take the gradients of inputs away from them."""
    for value in inputs:
        if type(value) is not torch.Tensor or not (value.is_leaf or value.retains_grad):
            break
    else:
        return tuple(pop_gradients(inputs))
    found = []
    for value in inputs:
        gradient = value.grad if needs_gradient(value) and (value.is_leaf or value.retains_grad) else None
        if gradient is not None:
            value.grad = None
        found.append(gradient)
    return tuple(found)


def kept_gradients(inputs: Sequence[Any]) -> Gradients:
    """Get the gradients of what the model was called with: they are the user's, and stay where they are."""
    return tuple([value.grad if needs_gradient(value) and value.is_leaf else None for value in inputs])


def detach_in_place(outputs: Sequence[Any]) -> None:
    """Free the graph of outputs that live on. That of a view cannot be cut off in place."""
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None and not output._is_view():
            output.detach_()


def nothing() -> None:
    """Do nothing: the second half of a backward that has only one."""
