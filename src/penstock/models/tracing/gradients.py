"""Finds values that can have no gradient, whatever is trained: nothing goes back for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.models.tracing.regions import Mode

if TYPE_CHECKING:
    from torch import fx

    from penstock.models.tracing.scopes import Scope

#: In the metadata of a node that can have no gradient.
_NONE: Final = "has_no_gradient"


def mark_values_without_gradient(graph: fx.Graph, scopes: dict[fx.Node, Scope]) -> None:
    """Note in the metadata of nodes which can have no gradient: made in a no_grad region, or of integers alone."""
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            possible = _is_differentiable(node)
        elif node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default):
            possible = False
        else:
            depends = any(can_have_gradient(value) for value in node.all_input_nodes)
            possible = depends and _is_differentiable(node) and _records(scopes.get(node, ()))
        if not possible:
            node.meta[_NONE] = True


def can_have_gradient(node: fx.Node) -> bool:
    """Return whether a node may have a gradient, by its metadata; what is not known may."""
    return not node.meta.get(_NONE, False) and _is_differentiable(node)


def copy_knowledge(node: fx.Node, to: fx.Node) -> None:
    """Let a node stand for another one: the same example, and the same knowledge about gradients."""
    to.meta["val"] = node.meta.get("val")
    if node.meta.get(_NONE):
        to.meta[_NONE] = True


def _is_differentiable(node: fx.Node) -> bool:
    example: Any = node.meta.get("val")
    return not isinstance(example, torch.Tensor) or example.is_floating_point() or example.is_complex()


def _records(scope: Scope) -> bool:
    """Whether the innermost region that decides about gradients lets them be recorded."""
    modes = [mode.gradients for mode in scope if isinstance(mode, Mode) and mode.autocast is None]
    return not modes or modes[-1]
