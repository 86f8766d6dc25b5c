"""Pickles a graph node by node, so that what is known about its values is kept."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What is kept of the metadata of a node.
_KEPT = ("val", "nn_module_stack", "stack_trace", "stage_idx", "has_no_gradient")


class NodeReference:
    """Stands for a node, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name


class LinearNodeList:
    """The nodes of a graph, without the graph.

    Attributes:
        serialize_node_list: the nodes in order; they refer to each other by name.
    """

    def __init__(self, node_list: Iterable[fx.Node]) -> None:
        self.serialize_node_list = [_alone(node) for node in node_list]

    def __getstate__(self) -> list[dict[str, Any]]:
        """What makes a node, of each."""
        return [
            {
                **{name: getattr(node, name) for name in ("name", "op", "args", "kwargs", "type")},
                "target": _encoded(node.target),
                "meta": {key: _without_data(node.meta[key]) for key in _KEPT if key in node.meta},
            }
            for node in self.serialize_node_list
        ]

    def __setstate__(self, state: list[dict[str, Any]]) -> None:
        self.serialize_node_list = [_node(**{**each, "target": _decoded(each["target"])}) for each in state]

    def to_graph(self) -> fx.Graph:
        """Return a graph of these nodes."""
        graph = fx.Graph()
        made: dict[str, fx.Node] = {}

        def find(value: Any) -> Any:
            return made[value.name] if isinstance(value, NodeReference) else value

        for node in self.serialize_node_list:
            args, kwargs = map_aggregate(node.args, find), map_aggregate(node.kwargs, find)
            copied = graph.create_node(node.op, node.target, args, kwargs, name=node.name, type_expr=node.type)
            copied.meta = copy.copy(node.meta)
            made[node.name] = copied
        return graph


def _alone(node: fx.Node) -> fx.Node:
    def refer(other: fx.Node) -> Any:
        return NodeReference(other.name)

    args, kwargs = map_arg(node.args, refer), map_arg(node.kwargs, refer)
    return _node(node.name, node.op, node.target, args, kwargs, node.type, copy.copy(node.meta))


def _node(name: str, op: str, target: Any, args: Any, kwargs: Any, type: Any, meta: dict[str, Any]) -> fx.Node:  # noqa: A002
    node = fx.Node(None, name, op, target, args, kwargs, type)  # type: ignore[arg-type]
    node.meta = meta
    return node


class _Operator(NamedTuple):
    """The name of an operator, which cannot be pickled itself."""

    namespace: str
    name: str
    overload: str


def _encoded(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _Operator(namespace, name, target._overloadname)
    return target


def _decoded(target: Any) -> Any:
    if isinstance(target, _Operator):
        return getattr(getattr(getattr(torch.ops, target.namespace), target.name), target.overload)
    return target


def _without_data(value: Any) -> Any:
    """What is known about a value: tensors become tensors on the meta device."""
    return _pytree.tree_map_only(torch.Tensor, _on_meta, value)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)
