"""Adds weight gradients to leaves of the autograd graph without the engine.

The engine adds a gradient to ``.grad`` and shows it to hooks. Where there are none, a product is added
to ``.grad`` as it is computed, without a temporary as large as the weight; and for a small weight the engine
takes longer than the product does.

Hooks that are set in C++ cannot be seen: those of ``DistributedDataParallel`` are the ones that torch has. On
accelerators the engine brings streams into order, too, so leaves there are left to it. So are those of ranks that are
threads of one process: the engine locks a leaf, and another rank may have it as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import mm

from penstock.execution.autograd import is_lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class LeafGradient:
    """A leaf, and the node in the graph where its gradients are added up.

    Attributes:
        node: the node.
        tensor: the leaf itself.
    """

    __slots__ = ("_after", "_before", "_is_plain", "node", "tensor")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.tensor: torch.Tensor = node.variable
        self._is_plain = type(self.tensor) in _PLAIN and self.tensor.is_cpu and self.tensor.layout is torch.strided
        self._before = _hooks(node.register_prehook)
        self._after = _hooks(node.register_hook)

    @property
    def has_node_hooks(self) -> bool:
        """Whether the node has hooks."""
        return bool(self._before or self._after)

    @property
    def is_unhooked(self) -> bool:
        """Whether gradients can be added here: no hook observes them."""
        tensor = self.tensor
        watched = self.has_node_hooks or tensor._backward_hooks or tensor._post_accumulate_grad_hooks
        return self._is_plain and tensor.requires_grad and not watched

    def takes(self, gradient: torch.Tensor) -> bool:
        """Whether what is made of a gradient can be added here, and the engine would do the same."""
        if not self.is_unhooked or not is_plain(gradient):
            return False
        tensor = self.tensor
        grad = tensor.grad
        if grad is None:
            kept_as = getattr(tensor, "grad_dtype", tensor.dtype)
            return tensor.dtype is gradient.dtype and kept_as is gradient.dtype and tensor.is_contiguous()
        return is_plain(grad) and grad.dtype is gradient.dtype and grad.is_contiguous() and not grad.requires_grad

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the product of two matrices."""
        grad = self.tensor.grad
        if grad is None:
            self.tensor.grad = mm(left, right)
        else:
            torch.addmm(grad, left, right, out=grad)  # which FLOP counters know, unlike addmm_

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient that nothing else refers to. Where the leaf was broadcast, it gets the sum."""
        grad = self.tensor.grad
        if gradient.shape != self.tensor.shape:
            gradient = gradient.sum_to_size(self.tensor.shape)
        if grad is None:
            self.tensor.grad = gradient
        else:
            grad.add_(gradient)


def add_where_possible(
    leaves: Sequence[LeafGradient], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Add gradients where there are some already; those that are left for the engine, None for the others."""
    left = list(gradients)
    grads, ours = [], []
    for number, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        if gradient is None or (grad := leaf.tensor.grad) is None or is_lazy(grad):
            continue
        if leaf.takes(gradient):
            grads.append(grad)
            ours.append(gradient)
            left[number] = None
    if grads:
        torch._foreach_add_(grads, ours)
    return left


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is dense, and not of a subclass."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def _hooks(register: Callable[[Callable[..., None]], Any]) -> dict[int, Any]:
    """Get the hooks of a kind that a node has, now and later: the node keeps them in one dict."""
    handle = register(_nothing)
    hooks: dict[int, Any] = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def _nothing(*_: Any) -> None:
    """Do nothing, as a hook."""
