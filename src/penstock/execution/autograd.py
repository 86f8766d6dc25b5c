"""The autograd engine, called for edges of the graph.

``torch.autograd.backward`` and ``grad`` check every root in Python, which for an edge takes longer than many a small
node. The engine makes the same checks itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOTHING: Final = nullcontext()
#: Part of torch's error for a leaf, or a view of one, that is modified in place.
_INPLACE_ON_LEAF: Final = "leaf Variable that requires grad"
_run_backward = torch.autograd.Variable._execution_engine.run_backward


def gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """Where the graph of a tensor that needs a gradient begins."""
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a leaf; one that Python owns must be kept alive
        with torch.inference_mode(False):  # in which a leaf has no node
            return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def _run_without_autocast(*args: Any, **kwargs: Any) -> Any:
    with without_autocast():
        return _run_backward(*args, **kwargs)


def without_autocast() -> AbstractContextManager[None]:
    """For a backward: it has the types of its forward, which autocast around the whole step must not change."""
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else _NOTHING


def run_backward(roots: Sequence[GradientEdge | torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Run a backward from the roots; gradients are added to ``.grad`` of every leaf that is reached."""
    run = _run_without_autocast if torch._C._is_any_autocast_enabled() else _run_backward
    run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_at(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], wanted: Sequence[GradientEdge | torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Run as much of a backward as leads to the wanted edges or leaves; what flows there, None where nothing does."""
    run = _run_without_autocast if torch._C._is_any_autocast_enabled() else _run_backward
    found: tuple[torch.Tensor | None, ...] = run(
        tuple(roots), tuple(gradients), False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return found


def pop_gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of leaves, taken away from them, each in memory that nobody else will change."""
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [gradient.clone() if gradient is not None and shares_storage(gradient) else gradient for gradient in found]


def unshare_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give every parameter that has just got its first gradient one of its own; returns those that still have none.

    Autograd may make the gradients of two leaves as views of the same memory. The next microbatch is added in place,
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
    """Whether it is a conjugate or negative of what is in its memory: operations on many do not change it in place."""
    return tensor.is_conj() or tensor.is_neg()


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether another tensor uses the same memory. A sparse one has none that could be asked for."""
    if tensor.layout is not torch.strided:
        return False
    # Two know it here: the tensor, and the object by which it is asked.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2
