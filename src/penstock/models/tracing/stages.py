"""Makes a module per stage of an exported model, and the graph that calls them in turn."""

from __future__ import annotations

import copy
import operator
from inspect import signature
from typing import TYPE_CHECKING, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from penstock.models.tracing.exporting import module_of
from penstock.models.tracing.gradients import copy_knowledge, mark_values_without_gradient
from penstock.models.tracing.graph_modules import TracedModule
from penstock.models.tracing.names import TensorNames
from penstock.models.tracing.outline import Source, build_module, one_or_all
from penstock.models.tracing.parts import Part, cut
from penstock.models.tracing.regions import inline_regions
from penstock.models.tracing.scopes import find_scopes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.export import ExportedProgram


#: Where the module that calls the stages keeps the structure of what the model returns.
RETURNS: Final = "returns"


def make_stages(
    model: torch.nn.Module,
    program: ExportedProgram,
    stage_name: Callable[[int], str],
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> fx.GraphModule:
    """Return a module that calls one module per stage, of the given names.

    Args:
        model: the model that was exported; its tensors are used, under its names.
        program: what the export has returned.
        stage_name: the name of a stage's module.
        split_policy: inserts marks into the exported graph.
    """
    traced = module_of(model, program)
    inline_regions(traced)
    if split_policy is not None:
        traced = split_policy(traced)
    scopes = find_scopes(traced.graph)
    source = Source(traced, TensorNames(model), scopes.of)
    mark_values_without_gradient(traced.graph, scopes.of)
    parts = _with_order_of_inputs(cut(traced.graph, scopes.switches), traced)
    root = torch.nn.Module()
    for number, part in enumerate(parts):
        stage = build_module(source, part.nodes, part.inputs, one_or_all(part.outputs))
        if number == 0 and _takes_all(part, traced):
            _take_arguments_of(traced, stage)
        root.add_module(stage_name(number), stage)
    calling = TracedModule(root, _calling(traced.graph, parts, stage_name))
    calling.meta[RETURNS] = traced.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    return calling


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _takes_all(part: Part, traced: fx.GraphModule) -> bool:
    """Whether a part takes all arguments of the model, each of which is one tensor."""
    placeholders = _placeholders(traced.graph)
    return set(part.inputs) == set(placeholders) and len(placeholders) == len(signature(traced.forward).parameters)


def _with_order_of_inputs(parts: Sequence[Part], traced: fx.GraphModule) -> list[Part]:
    """The first part takes arguments in the order of the model, not of their use, if it takes all.

    The others take the values of earlier parts first: a stage is passed the arguments of the model by keyword.
    """
    first, *rest = parts
    if _takes_all(first, traced):
        first = first._replace(inputs=_placeholders(traced.graph))
    others = [part._replace(inputs=sorted(part.inputs, key=lambda node: node.op == "placeholder")) for part in rest]
    return [first, *others]


def _take_arguments_of(traced: fx.GraphModule, stage: fx.GraphModule) -> None:
    """Let the first stage be called as the model is, with keyword arguments."""
    codegen = copy.copy(traced.graph._codegen)
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)  # type: ignore[attr-defined]
    stage.graph.set_codegen(codegen)
    stage.recompile()


def _calling(graph: fx.Graph, parts: Sequence[Part], stage_name: Callable[[int], str]) -> fx.Graph:
    """The graph that calls the modules of all stages: placeholders, calls, items of their results, output."""
    calling = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    for node in _placeholders(graph):
        here[node] = calling.node_copy(node)
    for number, part in enumerate(parts):
        called = calling.call_module(stage_name(number), tuple(here[value] for value in part.inputs))
        if len(part.outputs) == 1:
            here[part.outputs[0]] = called
        else:
            for position, value in enumerate(part.outputs):
                here[value] = calling.call_function(operator.getitem, (called, position))
        for value in part.outputs:
            copy_knowledge(value, here[value])
    calling.output(map_arg(graph.output_node().args[0], here.__getitem__))
    return calling
