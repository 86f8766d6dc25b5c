"""Computes the gradients of weights from those of products: the rules for nodes of the autograd graph.

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

from penstock.execution.split_backward.graph_shape import LEAF
from penstock.execution.split_backward.leaf_gradients import LeafGradient

#: Gradients from that of the output and the operand.
Compute = Callable[[torch.Tensor, Any], list[torch.Tensor]]
#: Adds these gradients to the leaves that they are for.
AddInPlace = Callable[[torch.Tensor, Any, Sequence[LeafGradient]], None]
#: The operands of nodes; None if one of them has to make its gradients itself, or in another way. All at once, since
#: there are many.
Operands = Callable[[Sequence[Any]], list[Any] | None]


class WeightRule(NamedTuple):
    """What to keep of nodes, and what to make of it.

    Attributes:
        operands: finds what to keep.
        make: makes the gradients, one for each edge that leads to weights.
        vector: whether the first is for a leaf that has one dimension, and only for such.
        behind: whether the last is for the leaf below the node that the edge leads to, which transposes it.
        add: adds the gradients to leaves as it makes them, where it can be done in one.
    """

    operands: Operands
    make: Compute
    vector: bool = False
    behind: bool = False
    add: AddInPlace | None = None


def find_rule(node: Any, wanted: Sequence[int], *, adds_in_place: bool) -> WeightRule | None:
    """Find the rule for these edges of a node, and of nodes at this place of such graphs; None without.

    `adds_in_place` is whether gradients may be added to leaves here.
    """
    maker = _RULES.get((type(node).__name__, tuple(wanted)))
    return None if maker is None else maker(node, adds_in_place)


_data: Final = attrgetter("data")
_detached: Final = torch.Tensor.detach
_unpack_hook: Final = attrgetter("unpack_hook")
_layout: Final = attrgetter("layout")
_dtype: Final = attrgetter("dtype")
_right_strides: Final = attrgetter("_saved_mat2_sym_strides")
_right: Final = attrgetter("_saved_mat2")
_hooks: Final = attrgetter("_backward_hooks")
_retains: Final = attrgetter("retains_grad")
_STRIDED: Final = {torch.strided}
_COMPLEX: Final = {torch.complex32, torch.complex64, torch.complex128}
_ONE: Final = {1}
#: Bytes of a weight for which a node of the graph takes longer than to copy it.
_SMALL: Final = 1 << 18


def _saved(name: str, *factors: str) -> Operands:
    """Get the operand that nodes have saved under a name. Factors must be 1.

    None if it is available only through a hook, which the node has to call; or if it is sparse, which has other rules.
    Whether it has been modified since it was saved is not checked here: the engine checks when it reaches the node, and
    a later user can see it by the version.
    """
    saved = attrgetter(f"_raw_saved_{name}")
    of_each = [attrgetter(f"_saved_{factor}") for factor in factors]

    def operands(nodes: Sequence[Any]) -> list[Any] | None:
        found = list(map(saved, nodes))
        if any(map(_unpack_hook, found)) or not all(_ONE.issuperset(map(factor, nodes)) for factor in of_each):
            return None
        values = list(map(_data, found))
        if not _STRIDED.issuperset(map(_layout, values)):
            return None
        detached: list[torch.Tensor] = list(map(_detached, values))
        if not _COMPLEX.isdisjoint(map(_dtype, detached)):
            return [one.conj() for one in detached]
        return detached

    return operands


def _beside_dense(find: Operands) -> Operands:
    """Apply a rule where no node has a sparse right operand, whose gradient would be sparse as well."""

    def operands(nodes: Sequence[Any]) -> list[Any] | None:
        return find(nodes) if all(map(_right_strides, nodes)) else None

    return operands


def _without_hooks(find: Operands) -> Operands:
    """Apply a rule where, in addition, no hook observes the gradient of the right operand itself."""

    def operands(nodes: Sequence[Any]) -> list[Any] | None:
        found = find(nodes)
        if found is None:  # also where tensors are saved elsewhere, and had to be fetched to be looked at
            return None
        rights = list(map(_right, nodes))  # the tensors themselves, with their hooks
        if any(right is None for right in rights):  # not saved, since the left one needs no gradient
            return None
        if not _STRIDED.issuperset(map(_layout, rights)) or any(map(_hooks, rights)) or any(map(_retains, rights)):
            return None
        return found

    return operands


def _convolution_operands(wanted: Sequence[int], nodes: Sequence[Any]) -> list[Any] | None:
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


def _right_of(find: Operands, *, bias: bool = False) -> Callable[[Any, bool], WeightRule]:
    """Make the rule for the right operand of a product, the weight of a linear layer, and for an added bias."""
    dense, unseen = _beside_dense(find), _without_hooks(find)

    def rule(node: Any, adds_in_place: bool) -> WeightRule:
        if not _is_turned(node):
            return WeightRule(dense, _product_and_bias if bias else _product)
        row = node.next_functions
        if not _is_leaf_turned(row[-1][0], adds_in_place) or unseen([node]) is None:
            return WeightRule(dense, _turned_and_bias if bias else _turned)
        if bias and _is_vector(row[0][0]):
            return WeightRule(unseen, _turned_back_and_sum, vector=True, behind=True, add=_add_turned_back_and_sum)
        if bias:
            return WeightRule(unseen, _turned_back_and_bias, behind=True)
        return WeightRule(unseen, _turned_back, behind=True, add=_add_turned_back)

    return rule


def _is_turned(node: Any) -> bool:
    """Whether the right operand is a transposed matrix, as the weight of a linear layer is."""
    strides = _right_strides(node)  # none of a sparse one
    return bool(strides and strides[-2] == 1)


def _is_leaf_turned(node: Any, adds_in_place: bool) -> bool:
    """Whether a node is that of the transpose of a leaf, and the leaf is small, or gradients can be added to it here.

    What is handed to the engine for a leaf itself, and is its first gradient, is copied, since it is known here, too.
    """
    if type(node).__name__ != "TBackward0":
        return False
    leaf = node.next_functions[0][0]
    return type(leaf).__name__ == LEAF and (
        leaf.variable.nbytes <= _SMALL or (adds_in_place and LeafGradient(leaf).is_unhooked)
    )


def _is_vector(node: Any) -> bool:
    """Whether a node is that of a leaf with one dimension."""
    return type(node).__name__ == LEAF and node.variable.dim() == 1


def _product(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [mm(left.t(), gradient)]


def _turned(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    """With the layout that makes it contiguous when it is turned back."""
    return [mm(gradient.T, left).t()]


def _turned_back(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [mm(gradient.T, left)]


def _product_and_bias(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the bias is that of the output, summed to the size of the bias, which the engine does."""
    return [gradient, mm(left.t(), gradient)]


def _turned_and_bias(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [gradient, mm(gradient.T, left).t()]


def _turned_back_and_bias(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [gradient, mm(gradient.T, left)]


def _turned_back_and_sum(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    """Summed while the gradient is in the caches; and then it is free."""
    return [gradient.sum(0), mm(gradient.T, left)]


def _add_turned_back(gradient: torch.Tensor, left: torch.Tensor, leaves: Sequence[LeafGradient]) -> None:
    leaves[-1].add_product(gradient.T, left)


def _add_turned_back_and_sum(gradient: torch.Tensor, left: torch.Tensor, leaves: Sequence[LeafGradient]) -> None:
    leaves[0].add(gradient.sum(0))
    leaves[1].add_product(gradient.T, left)


def _left(gradient: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    return [mm(gradient, right.t())]


def _rights(gradient: torch.Tensor, left: torch.Tensor) -> list[torch.Tensor]:
    return [bmm(left.mT, gradient)]


def _lefts(gradient: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    return [bmm(gradient, right.mT)]


def _convolved(wanted: Sequence[int], gradient: torch.Tensor, operands: Any) -> list[torch.Tensor]:
    made = torch.ops.aten.convolution_backward(gradient, *operands)
    return [made[number] for number in wanted]


def _fixed(operands: Operands, make: Compute) -> Callable[[Any, bool], WeightRule]:
    rule = WeightRule(operands, make)
    return lambda _node, _alone: rule


#: By the name of the node's type and the numbers of its edges that lead to weights. The factors of ``addmm`` are those
#: of ``beta * bias + alpha * left @ right``.
_RULES: Final[dict[tuple[str, tuple[int, ...]], Callable[[Any, bool], WeightRule]]] = {
    ("MmBackward0", (0,)): _fixed(_saved("mat2"), _left),
    ("MmBackward0", (1,)): _right_of(_saved("self")),
    ("BmmBackward0", (0,)): _fixed(_saved("mat2"), _lefts),
    ("BmmBackward0", (1,)): _fixed(_saved("self"), _rights),
    ("AddmmBackward0", (1,)): _fixed(_saved("mat2", "alpha"), _left),
    ("AddmmBackward0", (2,)): _right_of(_saved("mat1", "alpha")),
    ("AddmmBackward0", (0, 2)): _right_of(_saved("mat1", "alpha", "beta"), bias=True),
    **{
        ("ConvolutionBackward0", wanted): _fixed(partial(_convolution_operands, wanted), partial(_convolved, wanted))
        for wanted in ((1,), (2,), (1, 2))
    },
}
