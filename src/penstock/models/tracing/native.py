"""Makes the stages of a trace fit the runtime: values by edge, arguments of the model by keyword, its own output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree

from penstock.errors import SplitError
from penstock.models.tracing.graph_modules import StageWithRegions
from penstock.models.tracing.wiring import Origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.models.tracing.wiring import Wiring


class NativeStage(StageWithRegions):
    """A stage that takes a value per edge, drops keyword arguments that it does not use, and returns a value per edge.

    Attributes:
        takes: the names of the arguments of the model that it uses.
        given: the names of all arguments of the model, if it is the first stage, in order.
        returns: the structure of what the model returns, if it is the last stage.
    """

    takes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    returns: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if self.given:
            kwargs = {**dict(zip(self.given, args, strict=False)), **kwargs}
            args = ()
        output = super().__call__(*args, **{name: kwargs[name] for name in self.takes if name in kwargs})
        return output if self.returns is None else _pytree.tree_unflatten(output, self.returns)


def native_stage(
    stage: fx.GraphModule, index: int, wiring: Wiring, arguments: Sequence[str], returns: Any
) -> NativeStage:
    """Return a module for the runtime, which shares all tensors and modules with that of the stage.

    Args:
        stage: the module of the stage.
        index: which stage it is.
        wiring: what goes between the stages, with the outputs of the model.
        arguments: the names of the arguments of the model.
        returns: the structure of what the model returns.
    """
    is_last = index == len(wiring.inputs) - 1
    graph = fx.Graph()
    coming = [origin for origin, edge in zip(wiring.origins, wiring.edges, strict=True) if index in edge.targets]
    taken: dict[Origin | str, fx.Node] = {
        origin: graph.placeholder(f"value_{origin.stage}_{origin.output}") for origin in coming
    }
    used = [value for value in wiring.inputs[index] if isinstance(value, str)]
    taken |= {name: graph.placeholder(name) for name in used}
    results = _copy(stage.graph, graph, [taken[value] for value in wiring.inputs[index]])
    if is_last:
        graph.output([_result(value, index, results, taken) for value in wiring.outputs])
    else:
        leaving = tuple(results[origin.output] for origin in wiring.origins if origin.stage == index)
        graph.output(leaving[0] if len(leaving) == 1 else leaving)
    module = NativeStage(stage, graph)
    module.takes = tuple(used)
    module.given = tuple(arguments) if index == 0 else ()
    module.returns = returns if is_last else None
    return module


def _copy(graph: fx.Graph, into: fx.Graph, arguments: Sequence[fx.Node]) -> list[Any]:
    """Copy the nodes of a graph that is called with these arguments; returns its outputs."""
    given, here = iter(arguments), {}
    for node in graph.nodes:
        if node.op == "placeholder":
            here[node] = next(given)
            here[node].meta = dict(node.meta)
        elif node.op == "output":
            outputs: Any = map_arg(node.args[0], here.__getitem__)
        else:
            here[node] = into.node_copy(node, here.__getitem__)
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _result(value: Any, index: int, results: Sequence[Any], taken: dict[Origin | str, fx.Node]) -> Any:
    """An output of the model in the last stage, which has made it, or has been sent it."""
    if isinstance(value, Origin):
        return results[value.output] if value.stage == index else taken[value]
    if isinstance(value, str) and value not in taken:
        raise SplitError(
            f"the model returns its argument {value!r}, which its last stage does not take; leave it out of the output"
        )
    return taken[value] if isinstance(value, str) else value
