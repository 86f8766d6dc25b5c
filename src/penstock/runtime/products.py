"""How the gradient of a weight is made from that of a product: the rules for nodes of the autograd graph.

A rule takes a node. It returns what makes the gradients for some of the node's edges, those that lead to weights, and
the operand that this needs beside the gradient of the node's output, which holds nothing else of the graph; or None if
the gradients have to be made by the node itself. Which rule it is depends on the type of the node and on these edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import bmm, mm

#: Gradients from that of the output and the operand.
Make = Callable[[torch.Tensor, Any], list[torch.Tensor]]
Rule = Callable[[Any], tuple[Make, Any] | None]


def rule_for(kind: str, wanted: list[int]) -> Rule | None:
    """The rule for the edges with these numbers of a node of this type."""
    return _RULES.get(kind, {}).get(tuple(wanted))


def _mm_right(node: Any) -> tuple[Make, Any] | None:
    """The right operand of ``left @ right``."""
    left = _operand(node._raw_saved_self)
    if left is None:
        return None
    return _turned if _is_turned(node) else _right, left


def _mm_left(node: Any) -> tuple[Make, Any] | None:
    right = _operand(node._raw_saved_mat2)
    return None if right is None else (_left, right)


def _bmm_right(node: Any) -> tuple[Make, Any] | None:
    """The same for many."""
    left = _operand(node._raw_saved_self)
    return None if left is None else (_rights, left)


def _bmm_left(node: Any) -> tuple[Make, Any] | None:
    right = _operand(node._raw_saved_mat2)
    return None if right is None else (_lefts, right)


def _addmm_right(node: Any) -> tuple[Make, Any] | None:
    """The right operand of ``beta * bias + alpha * left @ right``."""
    left = _operand(node._raw_saved_mat1)
    if left is None or node._saved_alpha != 1:
        return None
    return _turned if _is_turned(node) else _right, left


def _addmm_right_and_bias(node: Any) -> tuple[Make, Any] | None:
    left = _operand(node._raw_saved_mat1)
    if left is None or node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    return _turned_and_bias if _is_turned(node) else _right_and_bias, left


def _addmm_left(node: Any) -> tuple[Make, Any] | None:
    right = _operand(node._raw_saved_mat2)
    return None if right is None or node._saved_alpha != 1 else (_left, right)


def _convolution(wanted: tuple[int, ...], node: Any) -> tuple[Make, Any] | None:
    """Weight and bias of a convolution."""
    if node._raw_saved_input.unpack_hook or node._raw_saved_weight.unpack_hook:
        return None
    values, weight, bias = node._saved_input.detach(), node._saved_weight.detach(), node._saved_bias_sym_sizes_opt
    settings = [
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ]
    return partial(_convolved, wanted), (values, weight, bias, *settings, [False, 1 in wanted, 2 in wanted])


def _operand(saved: Any) -> torch.Tensor | None:
    """What the gradient of a product is multiplied by.

    None if it is to be had by a hook only, which the node has to call; or if it is sparse, which has rules of its own.
    Whether it has been changed since it was saved is not asked here: the engine asks when it comes by the node.
    """
    if saved.unpack_hook:
        return None
    operand: torch.Tensor = saved.data
    if operand.layout is not torch.strided:
        return None
    return operand.detach().conj() if operand.is_complex() else operand.detach()


def _is_turned(node: Any) -> bool:
    """Whether the right operand is a transposed matrix, as the weight of a linear layer is."""
    return bool(node._saved_mat2_sym_strides[-2] == 1)


def _right(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [mm(left.t(), gradient)]


def _turned(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    """With the layout that makes it contiguous when it is turned back."""
    return [mm(gradient.t(), left).t()]


def _right_and_bias(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the bias is that of the output, summed to the size of the bias, which the engine does."""
    return [gradient, mm(left.t(), gradient)]


def _turned_and_bias(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [gradient, mm(gradient.t(), left).t()]


def _left(gradient: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    return [mm(gradient, right.t())]


def _rights(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [bmm(left.mT, gradient)]


def _lefts(gradient: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    return [bmm(gradient, right.mT)]


def _convolved(wanted: tuple[int, ...], gradient: torch.Tensor, operands: Any) -> list[torch.Tensor]:
    made = torch.ops.aten.convolution_backward(gradient, *operands)
    return [made[number] for number in wanted]


#: By the name of the node's type and the numbers of its edges that lead to weights.
_RULES: Final[dict[str, dict[tuple[int, ...], Rule]]] = {
    "MmBackward0": {(0,): _mm_left, (1,): _mm_right},
    "BmmBackward0": {(0,): _bmm_left, (1,): _bmm_right},
    "AddmmBackward0": {(1,): _addmm_left, (2,): _addmm_right, (0, 2): _addmm_right_and_bias},
    "ConvolutionBackward0": {wanted: partial(_convolution, wanted) for wanted in ((1,), (2,), (1, 2))},
}
