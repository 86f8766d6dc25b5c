"""How the gradients of weights are made from those of products: the rules for nodes of the autograd graph.

A rule says what to keep of nodes of one type, before the engine passes them, and how the gradients for some of a node's
edges, those that lead to weights, are made from that and the gradient of the node's output. What is kept holds nothing
else of the graph. Where nodes have to make the gradients themselves, it keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import bmm, mm

from penstock.runtime.graph_form import LEAF

#: Gradients from that of the output and the operand.
Make = Callable[[torch.Tensor, Any], list[torch.Tensor]]
#: The operands of nodes, from these and the edges of each; None if one of them has to make its gradients itself, or in
#: another way. All at once, since there are many.
Operands = Callable[[Sequence[Any], Sequence[Any]], list[Any] | None]


class Rule(NamedTuple):
    """What to keep of nodes, and what to make of it."""

    operands: Operands
    make: Make


def rule_for(node: Any, wanted: Sequence[int]) -> Rule | None:
    """The rule for the edges with these numbers of a node, and of nodes at this place of such graphs; None without."""
    maker = _RULES.get((type(node).__name__, tuple(wanted)))
    return None if maker is None else maker(node)


_data: Final = attrgetter("data")
_unpack_hook: Final = attrgetter("unpack_hook")
_layout: Final = attrgetter("layout")
_right_strides: Final = attrgetter("_saved_mat2_sym_strides")
_STRIDED: Final = {torch.strided}
_ONE: Final = {1}


def _saved(name: str, *factors: str) -> Operands:
    """The operand that nodes have saved under a name. Factors must be 1.

    None if it is to be had by a hook only, which the node has to call; or if it is sparse, which has rules of its own.
    Whether it has been changed since it was saved is not asked here: the engine asks when it comes by the node.
    """
    saved = attrgetter(f"_raw_saved_{name}")
    of_each = [attrgetter(f"_saved_{factor}") for factor in factors]

    def operands(nodes: Sequence[Any], _edges: Sequence[Any]) -> list[Any] | None:
        found = list(map(saved, nodes))
        if any(map(_unpack_hook, found)) or not all(_ONE.issuperset(map(factor, nodes)) for factor in of_each):
            return None
        values = list(map(_data, found))
        if not _STRIDED.issuperset(map(_layout, values)):
            return None
        detached: list[torch.Tensor] = list(map(_data, values))
        if any(map(torch.is_complex, detached)):
            return [one.conj() for one in detached]
        return detached

    return operands


def _beside_dense(find: Operands) -> Operands:
    """The same where the right operand of every node is no sparse tensor, whose gradient is sparse, too."""

    def operands(nodes: Sequence[Any], edges: Sequence[Any]) -> list[Any] | None:
        return find(nodes, edges) if all(map(_right_strides, nodes)) else None

    return operands


def _with_vector(find: Operands) -> Operands:
    """The same where the first edge of every node leads to a leaf with one dimension."""

    def operands(nodes: Sequence[Any], edges: Sequence[Any]) -> list[Any] | None:
        return find(nodes, edges) if all(_is_vector(row[0][0]) for row in edges) else None

    return operands


def _convolution_operands(wanted: Sequence[int], nodes: Sequence[Any], _edges: Sequence[Any]) -> list[Any] | None:
    if any(node._raw_saved_input.unpack_hook or node._raw_saved_weight.unpack_hook for node in nodes):
        return None
    settings = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return [
        (
            node._saved_input.detach(),
            node._saved_weight.detach(),
            *(getattr(node, f"_saved_{name}") for name in settings),
            [False, 1 in wanted, 2 in wanted],
        )
        for node in nodes
    ]


def _right_of(find: Operands, node: Any) -> Rule:
    return Rule(find, _turned if _is_turned(node) else _right)


def _right_and_bias_of(node: Any) -> Rule:
    if not _is_turned(node):
        return Rule(_ADDMM_LEFT_AND_BIAS, _right_and_bias)
    if _is_vector(node.next_functions[0][0]):
        return Rule(_ADDMM_LEFT_AND_VECTOR, _turned_and_sum)
    return Rule(_ADDMM_LEFT_AND_BIAS, _turned_and_bias)


def _is_turned(node: Any) -> bool:
    """Whether the right operand is a transposed matrix, as the weight of a linear layer is."""
    strides = _right_strides(node)  # none of a sparse one
    return bool(strides and strides[-2] == 1)


def _is_vector(node: Any) -> bool:
    """Whether a node is that of a leaf with one dimension."""
    return type(node).__name__ == LEAF and node.variable.dim() == 1


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


def _turned_and_sum(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    """Summed while the gradient is in the caches; and then it is free."""
    return [gradient.sum(0), mm(gradient.t(), left).t()]


def _left(gradient: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    return [mm(gradient, right.t())]


def _rights(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [bmm(left.mT, gradient)]


def _lefts(gradient: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    return [bmm(gradient, right.mT)]


def _convolved(wanted: Sequence[int], gradient: torch.Tensor, operands: Any) -> list[torch.Tensor]:
    made = torch.ops.aten.convolution_backward(gradient, *operands)
    return [made[number] for number in wanted]


def _fixed(operands: Operands, make: Make) -> Callable[[Any], Rule]:
    rule = Rule(operands, make)
    return lambda _node: rule


_MM_LEFT: Final = _beside_dense(_saved("self"))
_ADDMM_LEFT: Final = _beside_dense(_saved("mat1", "alpha"))
_ADDMM_LEFT_AND_BIAS: Final = _beside_dense(_saved("mat1", "alpha", "beta"))
_ADDMM_LEFT_AND_VECTOR: Final = _with_vector(_ADDMM_LEFT_AND_BIAS)
#: By the name of the node's type and the numbers of its edges that lead to weights. The factors of ``addmm`` are those
#: of ``beta * bias + alpha * left @ right``.
_RULES: Final[dict[tuple[str, tuple[int, ...]], Callable[[Any], Rule]]] = {
    ("MmBackward0", (0,)): _fixed(_saved("mat2"), _left),
    ("MmBackward0", (1,)): partial(_right_of, _MM_LEFT),
    ("BmmBackward0", (0,)): _fixed(_saved("mat2"), _lefts),
    ("BmmBackward0", (1,)): _fixed(_saved("self"), _rights),
    ("AddmmBackward0", (1,)): _fixed(_saved("mat2", "alpha"), _left),
    ("AddmmBackward0", (2,)): partial(_right_of, _ADDMM_LEFT),
    ("AddmmBackward0", (0, 2)): _right_and_bias_of,
    **{
        ("ConvolutionBackward0", wanted): _fixed(partial(_convolution_operands, wanted), partial(_convolved, wanted))
        for wanted in ((1,), (2,), (1, 2))
    },
}
