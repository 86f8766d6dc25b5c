"""Keeps a part of a graph from changing in place what it gets from another part.

A received value that requires a gradient is a leaf, which autograd does not let anyone change in place. So the
operation becomes one that returns a new value, which later nodes use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from penstock.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence


def replace_mutations(pieces: Sequence[Sequence[fx.Node]]) -> None:
    """Replace operations that change a value of another piece in place.

    Those of a value that has views stay. A third piece that uses such a view would miss the change: that raises
    ``TraceError``.
    """
    home = {node: number for number, piece in enumerate(pieces) for node in piece}
    order = {node: place for place, node in enumerate(node for piece in pieces for node in piece)}
    for node in order:
        for value in _changed(node):
            if value not in home or home[value] == home[node]:
                continue
            views = _views(value)
            functional = _functional(node.target)
            if views:
                _check_views(node, views, home, order)
            elif functional is not None and node.args[:1] == (value,):
                _replace(node, value, functional, order)


def _changed(node: fx.Node) -> list[Any]:
    """The values that an operation changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    return [value for argument, value in arguments if argument.alias_info is not None and argument.alias_info.is_write]


def _functional(target: Any) -> Any:
    """The form of an operation that returns a new value; None if there is none."""
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if name.endswith("_") else None


def _replace(node: fx.Node, value: fx.Node, functional: Any, order: dict[fx.Node, int]) -> None:
    node.target = functional
    for user in list(value.users):
        # The output of the graph is in no piece, and comes last.
        if user is not node and order.get(user, len(order)) > order[node]:
            user.replace_input_with(value, node)


def _views(value: fx.Node) -> list[fx.Node]:
    """What shares memory with a value: what it is a view of, and views of it."""
    base = value.args[0] if _is_view(value) else None
    return [*([base] if isinstance(base, fx.Node) else []), *filter(_is_view, value.users)]


def _is_view(node: fx.Node) -> bool:
    """Whether an operation returns a part of the memory of what it is given."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    infos = [result.alias_info for result in node.target._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _check_views(node: fx.Node, views: Sequence[fx.Node], home: dict[fx.Node, int], order: dict[fx.Node, int]) -> None:
    for view in views:
        for user in view.users:
            if order.get(user, len(order)) > order[node] and home.get(user) != home[node]:
                calls = list(node.meta.get("nn_module_stack", {}).values())
                where = calls[-1][0] if calls else ""
                raise TraceError(
                    f"{f'module {where!r}' if where else 'the model'} changes a value of an earlier stage in place "
                    f"({node.target}), and a later stage uses a view of it; split the model elsewhere, or use the "
                    "operation that returns a new value",
                    unit=where or None,
                )
