"""Reads from the graph that calls the stages of a trace what goes from which stage to which."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx

from penstock.ir.edges import Edge
from penstock.models.tracing.gradients import can_have_gradient


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
        stage: the stage that returns it.
        output: which of its outputs it is.
    """

    stage: int
    output: int


class Wiring(NamedTuple):
    """What goes between the stages of a trace.

    Attributes:
        inputs: for each stage what it is called with: origins of values, and names of arguments of the model.
        outputs: the same for what the model returns; other values than of nodes are there as they are.
        origins: for each edge the value on it.
        edges: the edges, by source and output.
    """

    inputs: tuple[tuple[Origin | str, ...], ...]
    outputs: tuple[Any, ...]
    origins: tuple[Origin, ...]
    edges: tuple[Edge, ...]


def read_wiring(graph: fx.Graph, *, with_outputs: bool) -> Wiring:
    """Return what goes between the stages; ``with_outputs`` also to the last one, which returns all of the model's."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    numbers = {node: stage for stage, node in enumerate(calls)}
    inputs = tuple(tuple(_origin(value, numbers) for value in call.args) for call in calls)
    returned: Any = graph.output_node().args[0]
    outputs = tuple(_origin(value, numbers) if isinstance(value, fx.Node) else value for value in returned)
    targets: dict[Origin, set[int]] = {}
    for stage, values in enumerate(inputs):
        for value in values:
            if isinstance(value, Origin):
                targets.setdefault(value, set()).add(stage)
    for value in outputs if with_outputs else ():
        if isinstance(value, Origin) and value.stage < len(calls) - 1:
            targets.setdefault(value, set()).add(len(calls) - 1)
    origins = tuple(sorted(targets))
    made = [node for node in graph.nodes if node in numbers or _is_item(node, numbers)]
    trained = {_origin(node, numbers): can_have_gradient(node) for node in made}
    edges = tuple(
        Edge(origin.stage, tuple(sorted(targets[origin])), f"output {origin.output}", trained.get(origin, True))
        for origin in origins
    )
    return Wiring(inputs, outputs, origins, edges)


def _origin(value: Any, numbers: dict[fx.Node, int]) -> Origin | str:
    if value.op == "placeholder":
        return str(value.name)
    call, output = value.args if value.target is operator.getitem else (value, 0)
    return Origin(numbers[call], output)


def _is_item(node: fx.Node, numbers: dict[fx.Node, int]) -> bool:
    return node.target is operator.getitem and node.args[0] in numbers
