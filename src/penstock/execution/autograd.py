"""Calls the autograd engine on edges of the graph.

``torch.autograd.backward`` and ``grad`` check every root in Python, which takes longer than running many a small
node. The engine makes the same checks itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOTHING: Final = nullcontext()
#: Part of torch's error for a leaf, or a view of one, that is modified in place.
_INPLACE_ON_LEAF: Final = "leaf Variable that requires grad"
_run_backward = torch.autograd.Variable._execution_engine.run_backward


def needs_gradient(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can have a gradient.

    >>> [is_differentiable(dtype) for dtype in (torch.float16, torch.complex64, torch.int64)]
    [True, True, False]
    """
    return dtype.is_floating_point or dtype.is_complex


def gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """Get the edge at which the graph of a tensor that requires a gradient begins."""
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a leaf; one that Python owns must be kept alive
        with torch.inference_mode(False):  # in which a leaf has no node
            return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def _run_without_autocast(*args: Any, **kwargs: Any) -> Any:
    with without_autocast():
        return _run_backward(*args, **kwargs)


def without_autocast() -> AbstractContextManager[None]:
    """Disable autocast for a backward, which uses the types of its forward."""
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else _NOTHING


def run_backward(roots: Sequence[GradientEdge | torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Run a backward from the roots; gradients are added to ``.grad`` of every leaf that is reached."""
    run = _run_without_autocast if torch._C._is_any_autocast_enabled() else _run_backward
    run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_at(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], wanted: Sequence[GradientEdge | torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Run the part of a backward that leads to these edges or leaves; return their gradients, None for one without."""
    run = _run_without_autocast if torch._C._is_any_autocast_enabled() else _run_backward
    found: tuple[torch.Tensor | None, ...] = run(
        tuple(roots), tuple(gradients), False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return found


def pop_gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Take the gradients away from leaves, each in memory that nothing else will modify."""
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [gradient.clone() if gradient is not None and shares_storage(gradient) else gradient for gradient in found]


def unshare_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give first gradients their own memory; return the parameters that still have no gradient.

    Autograd may create the gradients of two leaves as views of the same memory. The next microbatch is added in place,
    and would change both.
    """
    left = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            left.append(parameter)
        elif type(gradient) is torch.Tensor and shares_storage(gradient):
            parameter.grad = gradient.clone()
    return left


def is_inplace_on_leaf(error: BaseException) -> bool:
    """Whether torch raised it because a leaf that needs a gradient, or a view of one, was modified in place."""
    return _INPLACE_ON_LEAF in str(error)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a lazy conjugate or negative: foreach operations do not modify it in place."""
    return tensor.is_conj() or tensor.is_neg()


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether another tensor uses the same memory. A sparse tensor has no storage to ask."""
    if tensor.layout is not torch.strided:
        return False
    # Two references are ours: the tensor's, and that of the storage object used to ask.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2
