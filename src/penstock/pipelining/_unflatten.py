"""Rebuilds the modules of a model in the graph of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.models.tracing.names import TensorNames
from penstock.models.tracing.outline import Source, build_module
from penstock.models.tracing.scopes import find_scopes

if TYPE_CHECKING:
    from torch import fx


def _outline_submodules(orig_graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a graph, with a module inside for each call of one; its placeholders stay."""
    scopes = find_scopes(orig_graph)
    model = orig_graph.owning_module or torch.nn.Module()
    nodes = [node for node in scopes.of if node not in scopes.switches]
    inputs = [node for node in orig_graph.nodes if node.op == "placeholder"]
    source = Source(model, TensorNames(model), scopes.of)
    return build_module(source, nodes, inputs, orig_graph.output_node().args[0])
