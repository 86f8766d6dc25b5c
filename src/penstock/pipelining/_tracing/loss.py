"""Finds the loss among the outputs of a traced model, and appends the backward of every stage to its graph."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from penstock.errors import TraceError
from penstock.pipelining._backward import _null_coalesce_accumulate, stage_backward

if TYPE_CHECKING:
    from collections.abc import Callable


class LossWrapper(torch.nn.Module):
    """A model and its loss; derive from it and say in ``forward`` how they are connected."""

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """For derived classes to write."""
        raise NotImplementedError(
            f"{type(self).__name__} has no forward that connects its model and its loss; write one"
        )


class TrivialLossWrapper(LossWrapper):
    """The loss of what the model makes of one input."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


def _find_loss_from_output_and_spec(output_val: Any, spec_val: Any) -> Any:
    """The output that a spec, of the same structure, is True for; None if it is False."""
    if isinstance(spec_val, bool):
        if spec_val and not isinstance(output_val, fx.Node):
            raise TraceError(f"the loss spec points to {output_val!r}, which the model does not compute")
        return output_val if spec_val else None
    pairs = _pairs(output_val, spec_val)
    for output, spec in pairs:
        loss = _find_loss_from_output_and_spec(output, spec)
        if loss is not None:
            return loss
    raise TraceError(f"the loss spec {spec_val!r} is True for no output")


def _pairs(output: Any, spec: Any) -> list[tuple[Any, Any]]:
    if isinstance(spec, dict):
        if not isinstance(output, dict) or output.keys() != spec.keys():
            raise TraceError(f"the loss spec {spec!r} has other keys than the output {output!r}")
        return [(output[key], spec[key]) for key in spec]
    if isinstance(spec, (tuple, list)):
        if not isinstance(output, (tuple, list)) or len(output) != len(spec):
            raise TraceError(f"the loss spec {spec!r} has another length than the output {output!r}")
        return [*zip(output, spec, strict=True)]
    raise TraceError(f"a loss spec consists of True and False in tuples, lists and dicts, not {type(spec).__name__}")


def _find_loss_output(mod: torch.nn.Module, g: fx.Graph, output_loss_value_spec: Any) -> tuple[Any, fx.Node, Any]:
    """The node of the loss, the output node, and the spec; without one, an output called "loss" is it."""
    outputs = [node for node in g.nodes if node.op == "output"]
    if len(outputs) != 1:
        raise AssertionError(f"the graph should have one output node, but has {len(outputs)}")
    node = outputs[0]
    value: Any = node.args[0]
    if isinstance(mod, TrivialLossWrapper):
        is_wrapped = isinstance(value, (tuple, list)) and len(value) == 1  # as an export returns it
        return value[0] if is_wrapped else value, node, TrivialLossWrapper.loss_spec
    if output_loss_value_spec is not None:
        return _find_loss_from_output_and_spec(value, output_loss_value_spec), node, output_loss_value_spec
    if isinstance(value, dict) and "loss" in value:
        return value["loss"], node, {key: key == "loss" for key in value}
    return None, node, None


def _insert_stage_symbolic_backward(g: fx.Graph, loss_node: fx.Node, output_node: fx.Node) -> fx.Graph:
    """Append a backward for every stage that the loss depends on, from the last to the first."""
    stages = [node for node in g.nodes if node.op == "call_module"]
    items: dict[fx.Node, dict[int, fx.Node]] = defaultdict(dict)
    for node in g.nodes:
        if node.op != "call_function":
            continue
        if node.target is not operator.getitem or len(node.args) != 2:
            raise AssertionError(f"{node.format_node()} does not take an item of a stage's outputs")
        items[node.args[0]][node.args[1]] = node
    needed = _ancestors(loss_node)
    gradients: dict[fx.Node, fx.Node | None] = {loss_node: None}
    with g.inserting_before(output_node):
        for stage in reversed([stage for stage in stages if stage in needed]):
            found = items.get(stage)
            outputs = [found.get(place) for place in range(max(found) + 1)] if found else [stage]
            inputs = list(stage.all_input_nodes)
            backward = g.call_function(
                stage_backward,
                kwargs={
                    "stage_output": tuple(outputs),
                    "output_grads": tuple(gradients.get(each) if each is not None else None for each in outputs),
                    "input_values": inputs,
                    "outputs_with_grads_idxs": [place for place, each in enumerate(outputs) if each in needed],
                },
            )
            for place, value in enumerate(inputs):
                gradient = g.call_function(operator.getitem, (backward, place))
                if value in gradients and value.op != "placeholder":
                    gradient = g.call_function(_null_coalesce_accumulate, (gradients[value], gradient))
                gradients[value] = gradient
    return g


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it depends on."""
    found, left = {node}, [node]
    while left:
        left = [each for one in left for each in one.all_input_nodes if each not in found]
        found.update(left)
    return found
