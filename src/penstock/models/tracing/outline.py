"""Builds the module of a stage from a part of the graph, with a module inside for each call of one.

So its parameters have the names that they have in the model. Only one call of a module can have its place: any other
in the same stage becomes a module ``name@1``, which holds no parameters but is passed them.
"""

from __future__ import annotations

import operator
from collections import Counter
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from penstock.models.tracing.gradients import copy_knowledge
from penstock.models.tracing.graph_modules import StageWithRegions, TracedModule
from penstock.models.tracing.names import TensorNames, assign, find_attribute
from penstock.models.tracing.regions import Mode
from penstock.models.tracing.scopes import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.models.tracing.scopes import Scope


class Source(NamedTuple):
    """What modules are built from.

    Attributes:
        model: the exported model, which holds the tensors that the graph refers to.
        names: their names.
        scopes: where each node belongs.
    """

    model: torch.nn.Module
    names: TensorNames
    scopes: dict[fx.Node, Scope]


def build_module(source: Source, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], output: Any) -> fx.GraphModule:
    """Build a module that runs these nodes, given some values of other ones, and returns some of its own."""
    frame = _Frame(source, path="", owns=True, called=_called(source, nodes, 0))
    frame.take(inputs)
    frame.run(nodes, 0)
    has_regions = any(isinstance(scope, Mode) for node in nodes for scope in source.scopes[node])
    return frame.finish(output, StageWithRegions if has_regions else TracedModule)


class _Frame:
    """A module that is being built.

    Attributes:
        path: the name of the module in the model.
        owns: whether it has the place in the stage that it has in the model, and holds parameters.
        called: the names in the model of the modules that it calls itself.
    """

    def __init__(self, source: Source, *, path: str, owns: bool, called: set[str]) -> None:
        self.source = source
        self.path = path
        self.owns = owns
        self.called = called
        self._graph = fx.Graph()
        self._root = torch.nn.Module()
        self._here: dict[fx.Node, fx.Node] = {}
        self._placed: set[str] = set()
        self._others: Counter[str] = Counter()

    def take(self, inputs: Iterable[fx.Node]) -> None:
        """Add arguments."""
        for node in inputs:
            argument = self._graph.placeholder(node.name, type_expr=node.type)
            argument.meta = dict(node.meta)
            self._here[node] = argument

    def run(self, nodes: Sequence[fx.Node], depth: int) -> None:
        """Append nodes, which have as many scopes around them as ``depth`` in common with this module."""
        for scope, run in groupby(nodes, key=lambda node: _at(self.source.scopes[node], depth)):
            members = list(run)
            if scope is None:
                for node in members:
                    self._here[node] = self._graph.node_copy(node, self._value)
            elif isinstance(scope, Call):
                self._call(scope, members, depth)
            else:
                entered = scope.enter(self._graph)
                self.run(members, depth + 1)
                scope.leave(self._graph, entered)

    def finish(self, output: Any, kind: type[TracedModule] = TracedModule) -> fx.GraphModule:
        """Return the module; ``output`` is what it returns."""
        self._graph.output(map_arg(output, self._value))
        return kind(self._root, self._graph)

    def _call(self, call: Call, members: Sequence[fx.Node], depth: int) -> None:
        place, is_own = self._place(call.path)
        called = _called(self.source, members, depth + 1)
        child = _Frame(self.source, path=call.path, owns=self.owns and is_own, called=called)
        own = set(members)
        inputs = _used_from_outside(members, own, lambda node: child._local_name(node) is not None)
        outputs = [node for node in members if any(user not in own for user in node.users)]
        child.take(inputs)
        child.run(members, depth + 1)
        assign(self._root, place, child.finish(one_or_all(outputs)))
        self._receive(self._graph.call_module(place, tuple(map(self._value, inputs))), outputs)

    def _place(self, path: str) -> tuple[str, bool]:
        """Return where the module of a call goes, and whether that is its place in the model.

        It is not if an earlier call has that place, or the module of another call makes one there.
        """
        inside = f"{self.path}." if self.path else ""
        name = path.removeprefix(inside)
        around = set(accumulate(path.split(".")[:-1], "{}.{}".format))
        if path.startswith(inside) and name not in self._placed and not around & self.called:
            self._placed.add(name)
            return name, True
        name = name.replace(".", "_")
        self._others[name] += 1
        return f"{name}@{self._others[name]}", False

    def _receive(self, called: fx.Node, outputs: Sequence[fx.Node]) -> None:
        if len(outputs) == 1:
            self._here[outputs[0]] = called
            copy_knowledge(outputs[0], called)
            return
        for position, node in enumerate(outputs):
            item = self._graph.call_function(operator.getitem, (called, position))
            copy_knowledge(node, item)
            self._here[node] = item

    def _value(self, node: fx.Node) -> fx.Node:
        """What stands for a node of the whole graph in this module."""
        if node not in self._here:
            name = self._local_name(node)
            assert name is not None, f"{node} is not available in {self.path or 'the stage'}"
            value = find_attribute(self.source.model, str(node.target))
            persistent = self.source.names.is_persistent(f"{self.path}.{name}" if self.path else name)
            if isinstance(value, torch.nn.Module):
                name = self._free_name(name)
            assign(self._root, name, value, persistent=persistent)
            self._here[node] = self._graph.get_attr(name)
            self._here[node].meta = dict(node.meta)
        return self._here[node]

    def _local_name(self, node: fx.Node) -> str | None:
        """The name in this module of what a node gets from the model; None if this module does not hold it."""
        if node.op != "get_attr":
            return None
        value = find_attribute(self.source.model, str(node.target))
        if isinstance(value, torch.nn.Module):  # e.g. a branch of a condition, which is not passed as an argument
            return str(node.target).rpartition(".")[2]
        inside = f"{self.path}." if self.path else ""
        fitting = [name for name in self.source.names.names(value, str(node.target)) if name.startswith(inside)]
        return fitting[0].removeprefix(inside) if self.owns and fitting else None

    def _free_name(self, name: str) -> str:
        free, number = name, 0
        while hasattr(self._root, free):
            number += 1
            free = f"{name}_{number}"
        return free


def _called(source: Source, nodes: Iterable[fx.Node], depth: int) -> set[str]:
    """The names of the modules that nodes are in, the outermost of those that are not around all of them."""
    inner = (next((one for one in source.scopes[node][depth:] if isinstance(one, Call)), None) for node in nodes)
    return {call.path for call in inner if call is not None}


def one_or_all(outputs: Sequence[fx.Node]) -> Any:
    """What a module with these outputs returns: a single one as it is."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _at(scope: Scope, depth: int) -> Any:
    return scope[depth] if depth < len(scope) else None


def _used_from_outside(
    members: Sequence[fx.Node], own: set[fx.Node], is_held: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """What nodes use and do not make or hold themselves, in the order in which they use it."""
    used = dict.fromkeys(value for node in members for value in node.all_input_nodes)
    return [value for value in used if value not in own and not is_held(value)]
