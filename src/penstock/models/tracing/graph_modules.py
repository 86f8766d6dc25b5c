"""The modules that a trace is made into."""

from __future__ import annotations

import pickle
from typing import Any, Final

import torch
from torch import fx

from penstock.models.tracing.quiet import torch_warnings_hidden
from penstock.models.tracing.regions import modes_kept
from penstock.models.tracing.serialization import LinearNodeList

#: Attributes that follow from the graph.
_MADE_AGAIN: Final = frozenset({"_graph", "_code", "_in_spec", "_out_spec"})

#: Beside the attributes of a pickled module: how it is called, pickled; and whether it has regions.
_CODEGEN: Final = "_codegen"
_HAS_REGIONS: Final = "_has_regions"


class TracedModule(fx.GraphModule):
    """A stage of a traced model, or a module inside one. It can be copied and pickled."""

    def __init__(self, root: Any, graph: fx.Graph, class_name: str = "GraphModule") -> None:
        super().__init__(root, graph, class_name)
        if isinstance(root, torch.nn.Module):
            _keep_persistence(root, self)

    def __deepcopy__(self, memo: Any) -> Any:
        with torch_warnings_hidden():
            copied = super().__deepcopy__(memo)
        _keep_persistence(self, copied)
        return copied

    def __reduce__(self) -> Any:
        return reduce_graph_module(self)


class StageWithRegions(TracedModule):
    """A stage that has no_grad or autocast regions. If it fails inside of one, the mode is switched back."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with modes_kept():
            return super().__call__(*args, **kwargs)


def _keep_persistence(before: torch.nn.Module, after: torch.nn.Module) -> None:
    """Let buffers that are not part of the state dict stay so; a graph module takes all for persistent."""
    modules = dict(after.named_modules())
    for name, module in before.named_modules():
        if name in modules:
            names = module._non_persistent_buffers_set & modules[name]._buffers.keys()
            modules[name]._non_persistent_buffers_set |= names


def reduce_graph_module(module: fx.GraphModule) -> tuple[Any, ...]:
    """What pickles a module: its attributes and its nodes."""
    body = {name: value for name, value in vars(module).items() if name not in _MADE_AGAIN}
    body[_HAS_REGIONS] = isinstance(module, StageWithRegions)
    with torch_warnings_hidden():
        body[_CODEGEN] = pickle.dumps(module.graph._codegen)
    return restore_graph_module, (body, LinearNodeList(module.graph.nodes))


def restore_graph_module(body: dict[str, Any], nodes: LinearNodeList) -> fx.GraphModule:
    """Make the module again."""
    holder, graph = torch.nn.Module(), nodes.to_graph()
    vars(holder).update({name: value for name, value in body.items() if name not in (_CODEGEN, _HAS_REGIONS)})
    if _CODEGEN in body:
        with torch_warnings_hidden():
            graph.set_codegen(pickle.loads(body[_CODEGEN]))
    return (StageWithRegions if body.get(_HAS_REGIONS) else TracedModule)(holder, graph)
