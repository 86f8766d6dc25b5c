"""How the gradient of a weight is made from that of a product: the rules for nodes of the autograd graph.

A rule takes a node and the numbers of its edges that lead to weights. It returns a function from the gradient of the
node's output to the gradients for these edges, which holds the operands that it needs and nothing else of the graph; or
None if the gradient has to be made by the node itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

Product = Callable[[torch.Tensor], list[torch.Tensor]]
Rule = Callable[[Any, list[int]], Product | None]


def _mm(node: Any, wanted: list[int]) -> Product | None:
    """``left @ right``."""
    return _of_two(node, wanted, _is_turned(node))


def _bmm(node: Any, wanted: list[int]) -> Product | None:
    """The same for many."""
    return _of_two(node, wanted, False)


def _of_two(node: Any, wanted: list[int], turned: bool) -> Product | None:
    if wanted == [1]:
        left = _operand(node._raw_saved_self)
        return None if left is None else _right(left, turned)
    if wanted == [0]:
        right = _operand(node._raw_saved_mat2)
        return None if right is None else _left(right)
    return None


def _addmm(node: Any, wanted: list[int]) -> Product | None:
    """``beta * bias + alpha * left @ right``."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    if wanted == [0, 2] or wanted == [2]:
        left = _operand(node._raw_saved_mat1)
        if left is None:
            return None
        return _right(left, _is_turned(node)) if wanted == [2] else _right_and_bias(left, _is_turned(node))
    if wanted == [1]:
        right = _operand(node._raw_saved_mat2)
        return None if right is None else _left(right)
    return None


def _convolution(node: Any, wanted: list[int]) -> Product | None:
    """A convolution of an input with a weight, and a bias."""
    if 0 in wanted or node._raw_saved_input.unpack_hook or node._raw_saved_weight.unpack_hook:
        return None
    values, weight, bias = node._saved_input.detach(), node._saved_weight.detach(), node._saved_bias_sym_sizes_opt
    settings = [
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ]
    mask = [False, 1 in wanted, 2 in wanted]

    def product(gradient: torch.Tensor) -> list[torch.Tensor]:
        made = torch.ops.aten.convolution_backward(gradient, values, weight, bias, *settings, mask)
        return [made[index] for index in wanted]

    return product


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


def _right(left: torch.Tensor, turned: bool) -> Product:
    if turned:  # the gradient gets the layout that makes it contiguous when it is turned back
        return lambda gradient: [(gradient.mT @ left).mT]
    return lambda gradient: [left.mT @ gradient]


def _right_and_bias(left: torch.Tensor, turned: bool) -> Product:
    """The gradient of the bias is that of the output, summed to the size of the bias, which the engine does."""
    if turned:
        return lambda gradient: [gradient, torch.mm(gradient.t(), left).t()]
    return lambda gradient: [gradient, torch.mm(left.t(), gradient)]


def _left(right: torch.Tensor) -> Product:
    return lambda gradient: [gradient @ right.mT]


#: By the name of the node's type.
PRODUCTS: Final[dict[str, Rule]] = {
    "MmBackward0": _mm,
    "BmmBackward0": _bmm,
    "AddmmBackward0": _addmm,
    "ConvolutionBackward0": _convolution,
}
