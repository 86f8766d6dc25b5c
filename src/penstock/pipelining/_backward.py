"""The backward of a stage, whole or in two halves, as functions of tensors.

``stage_backward`` is the whole. ``stage_backward_input`` makes the gradients of the inputs and returns *parameter
groups*, from which ``stage_backward_weight`` makes those of the weights, later. A group is a dict:

- ``params``: the nodes of weights in the autograd graph,
- ``intermediates``: the nodes on the way to the inputs from which these weights are reached,
- ``grads``: for each of them a tuple with the gradients that came to its outputs.

It can be looked at and changed between the two calls. Stages themselves split their backward with
``penstock.execution.split_backward.split``, which runs every node once and keeps less.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.errors import RunError
from penstock.execution.autograd import run_backward
from penstock.pipelining._debug import map_debug_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.nn import Parameter

logger = logging.getLogger(__name__)

#: In a group whose intermediates are outputs that depend on no input: no hook has seen their gradients yet.
_FROM_OUTPUTS = "from_outputs"


def stage_backward(
    stage_output: Any, output_grads: Any, input_values: Any, outputs_with_grads_idxs: list[int] | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Run the backward of a stage: weights get their ``.grad``, and the gradients of the inputs are taken and returned.

    >>> x = torch.ones(2, requires_grad=True)
    >>> stage_backward((x * 3,), (torch.ones(2),), (x, "text"))
    (tensor([3., 3.]), None)

    Args:
        stage_output: tensors, or gradient edges of such, in any nesting of tuples, lists and dicts.
        output_grads: their gradients in the same nesting, or None; a single number as a loss needs none.
        input_values: what the stage was called with.
        outputs_with_grads_idxs: the outputs that count; all by default.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[index] for index in outputs_with_grads_idxs]
        output_grads = [output_grads[index] for index in outputs_with_grads_idxs]
    try:
        pairs = list(_pairs(stage_output, output_grads))
        run_backward([root for root, _ in pairs], [_seed(root, gradient) for root, gradient in pairs])
        return tuple(_taken(value) for value in input_values)
    except Exception as error:
        raise _failed("backward", stage_output, output_grads, input_values) from error


def stage_backward_input(
    stage_outputs_or_loss: list[torch.Tensor],
    output_grads: list[torch.Tensor] | None,
    input_values: list[Any],
    weights: Iterator[Parameter],
) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]]]:
    """Make the gradients of the inputs, and add them to their ``.grad``; those of the weights are left for later.

    The outputs lose their history, so that all of the graph that is not needed any more is free.

    Args:
        stage_outputs_or_loss: tensors, or gradient edges of such.
        output_grads: a gradient for each; ones if None.
        input_values: what the stage was called with; values that are not tensors count for nothing.
        weights: the parameters of the stage.

    Returns:
        The gradients of the inputs, None for one without; and the parameter groups.
    """
    try:
        outputs, gradients = _with_gradients(stage_outputs_or_loss, output_grads)
        roots = [_edge(output) for output in outputs]
        ends = _nodes(value for value in input_values if isinstance(value, torch.Tensor))
        params = _nodes(weights)
        reverse_edges = construct_reverse_graph([root.node for root in roots])
        groups = get_param_groups(ends, params, reverse_edges)
        with ExitStack() as handles:
            for group in groups:
                _watch(group, handles)
            found = _autograd_grad_for_inputs(outputs, input_values, gradients, retain_graph=True, allow_unused=True)
        groups += _beside_inputs(ends, params, reverse_edges, list(zip(roots, gradients, strict=True)))
        for value, gradient in zip(input_values, found, strict=True):
            if gradient is not None:
                value.grad = gradient if value.grad is None else value.grad.add_(gradient)
        _forget_history(stage_outputs_or_loss)
        return found, groups
    except Exception as error:
        raise _failed("backward of inputs", stage_outputs_or_loss, output_grads, input_values) from error


def stage_backward_weight(
    weights: Iterator[Parameter], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Add the gradients of the weights to their ``.grad``, which is what a plain backward would have done.

    A group can be used once: it gives up what it holds.

    Returns:
        What the weights had in ``.grad`` before.
    """
    listed = list(weights)
    before = tuple(weight.grad for weight in listed)
    weight_of = {_get_grad_fn_or_grad_acc(weight): weight for weight in listed}
    # Only such a group has nodes in common with others.
    retain_graph = retain_graph or any(_FROM_OUTPUTS in group for group in param_groups)
    for group in param_groups:
        if "intermediates" not in group:
            raise RunError("a parameter group was used a second time; call stage_backward_input again for new ones")
        if not group["params"] <= weight_of.keys():
            raise RunError(
                "a parameter group has a weight that is not among the weights; pass the same weights as to "
                "stage_backward_input"
            )
        nodes, saved = group.pop("intermediates"), group.pop("grads", ())
        edges = [
            (GradientEdge(node, number), gradient)
            for node, gradients in zip(nodes, saved, strict=False)
            for number, gradient in enumerate(gradients)
            if gradient is not None
        ]
        if not edges:
            continue
        with ExitStack() as handles:
            if _FROM_OUTPUTS not in group:
                _pin(nodes, saved, handles)
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [gradient for _, gradient in edges],
                retain_graph=retain_graph,
                inputs=[weight_of[param] for param in group["params"]],
            )
    return before


def get_param_groups(
    inputs: list[Node], params: list[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> list[dict[str, Any]]:
    """The weights that lie beside the way from outputs to inputs, in groups that share nothing.

    Args:
        inputs: the nodes of inputs.
        params: the nodes of weights.
        reverse_edges_dict: from every node to those above it, see ``construct_reverse_graph``.
    """
    above_inputs, _ = reverse_closure(inputs, set(), reverse_edges_dict)
    groups: dict[Node, dict[str, Any]] = {}
    for param in params:
        _, meeting = reverse_closure([param], above_inputs, reverse_edges_dict)
        joined: dict[str, Any] = {"params": {param}, "intermediates": set(meeting)}
        for group in {id(groups[node]): groups[node] for node in meeting if node in groups}.values():
            joined["params"] |= group["params"]
            joined["intermediates"] |= group["intermediates"]
        groups.update(dict.fromkeys(joined["intermediates"], joined))
    return list({id(group): group for group in groups.values()}.values())


def reverse_closure(
    roots: Sequence[Node | None], target_nodes: set[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> tuple[set[Node], set[Node]]:
    """All nodes above the roots, and the roots: up to the targets, which are returned apart."""
    closure = {root for root in roots if root is not None}
    met: set[Node] = set()
    waiting = deque(closure)
    while waiting:
        for above in reverse_edges_dict[waiting.popleft()]:
            if above in target_nodes:
                met.add(above)
            elif above not in closure:
                closure.add(above)
                waiting.append(above)
    return closure, met


def construct_reverse_graph(roots: Sequence[Node | None]) -> dict[Node, list[Node]]:
    """From every node below the roots to those above it, one for each edge. O(edges)."""
    reverse_edges: dict[Node, list[Node]] = defaultdict(list)
    waiting = deque(dict.fromkeys(root for root in roots if root is not None))
    while waiting:
        node = waiting.popleft()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if not reverse_edges[below]:
                waiting.append(below)
            reverse_edges[below].append(node)
    return reverse_edges


def _get_grad_fn_or_grad_acc(t: torch.Tensor) -> Node | None:
    """The node of a tensor in the autograd graph; that of a leaf is where its gradient is added up."""
    return get_gradient_edge(t).node if t.requires_grad and t.grad_fn is None else t.grad_fn


def _autograd_grad_for_inputs(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of those inputs that are tensors and need one; None for the others."""
    wanted = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    found: list[torch.Tensor | None] = [None] * len(inputs)
    if wanted and outputs:
        gradients = torch.autograd.grad(
            outputs, [inputs[index] for index in wanted], grad_outputs, retain_graph, allow_unused=allow_unused
        )
        for index, gradient in zip(wanted, gradients, strict=True):
            found[index] = gradient
    return tuple(found)


def _null_coalesce_accumulate(lhs: torch.Tensor | None, rhs: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, of which either may be missing."""
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return torch.add(lhs, rhs)


def _pairs(output: Any, gradient: Any) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """Every output that has a history, with its gradient."""
    if isinstance(output, (torch.Tensor, GradientEdge)):
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            return
        if gradient is not None and not isinstance(gradient, torch.Tensor):
            raise TypeError(f"expected a tensor as the gradient of a tensor, got a {type(gradient).__name__}")
        yield output, gradient
    elif gradient is None or not isinstance(output, (tuple, list, dict)):
        return
    elif isinstance(output, dict):
        if not isinstance(gradient, dict) or output.keys() != gradient.keys():
            raise TypeError(
                f"expected gradients for a dict with the keys {list(output)}, got {map_debug_info(gradient)}"
            )
        for key, value in output.items():
            yield from _pairs(value, gradient[key])
    else:
        if not isinstance(gradient, (tuple, list)) or len(output) != len(gradient):
            raise TypeError(f"expected gradients for {len(output)} outputs, got {map_debug_info(gradient)}")
        for value, its_gradient in zip(output, gradient, strict=True):
            yield from _pairs(value, its_gradient)


def _seed(root: Any, gradient: torch.Tensor | None) -> torch.Tensor:
    """The gradient of an output, which is 1 for a single number that comes without."""
    if gradient is None:
        if isinstance(root, GradientEdge) or root.numel() != 1 or not root.is_floating_point():
            raise ValueError(f"{map_debug_info(root)} is not a single number, so it needs an output gradient")
        return torch.ones_like(root, memory_format=torch.preserve_format)
    if isinstance(root, torch.Tensor) and root.shape != gradient.shape:
        raise ValueError(f"the gradient of a tensor of shape {list(root.shape)} has shape {list(gradient.shape)}")
    return gradient


def _taken(value: Any) -> torch.Tensor | None:
    """The gradient of an input, which does not keep it: its memory is free when it has been sent."""
    if not isinstance(value, torch.Tensor):
        return None
    gradient, value.grad = value.grad, None
    return gradient


def _with_gradients(
    outputs: Iterable[Any], gradients: Sequence[torch.Tensor] | None
) -> tuple[list[Any], list[torch.Tensor | None]]:
    """The outputs that have a history, and their gradients."""
    kept: list[tuple[Any, torch.Tensor | None]] = []
    for index, output in enumerate(outputs):
        is_edge = isinstance(output, GradientEdge)
        if is_edge and gradients is None:
            raise ValueError(f"output {index} is a gradient edge, which requires output gradients")
        if is_edge or output.requires_grad:
            kept.append((output, torch.ones_like(output) if gradients is None else gradients[index]))
    return [output for output, _ in kept], [gradient for _, gradient in kept]


def _nodes(tensors: Iterable[torch.Tensor]) -> list[Node]:
    return [node for node in map(_get_grad_fn_or_grad_acc, tensors) if node is not None]


def _edge(output: Any) -> GradientEdge:
    return output if isinstance(output, GradientEdge) else get_gradient_edge(output)


def _watch(group: dict[str, Any], handles: ExitStack) -> None:
    """Record the gradients of a group's intermediates while hooks are set."""
    nodes = group["intermediates"] = list(group["intermediates"])
    arrived: list[tuple[torch.Tensor | None, ...]] = [()] * len(nodes)

    def hook(place: int) -> Any:
        def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
            arrived[place] = gradients
            group["grads"] = arrived

        return keep

    for place, node in enumerate(nodes):
        handles.callback(node.register_prehook(hook(place)).remove)


def _pin(nodes: Sequence[Node], gradients: Sequence[Any], handles: ExitStack) -> None:
    """Have every node go on with these gradients.

    They hold already what comes from other nodes of the group, and what hooks have made of them.
    """
    for node, pinned in zip(nodes, gradients, strict=False):
        handles.callback(node.register_prehook(lambda _, pinned=pinned: pinned or None).remove)


def _beside_inputs(
    ends: Sequence[Node],
    params: Sequence[Node],
    reverse_edges: dict[Node, list[Node]],
    roots: Sequence[tuple[GradientEdge, torch.Tensor | None]],
) -> list[dict[str, Any]]:
    """Make a group for weights of outputs that depend on no input; none without such outputs."""
    above_inputs, _ = reverse_closure(ends, set(), reverse_edges)
    beside = [(root, gradient) for root, gradient in roots if root.node not in above_inputs]
    starts = {root.node for root, _ in beside}
    reached = {param for param in params if param in starts or reverse_closure([param], starts, reverse_edges)[1]}
    if not starts or not reached:
        return []
    gradients = [(*[None] * root.output_nr, gradient) for root, gradient in beside]
    nodes = [root.node for root, _ in beside]
    return [{"params": reached, "intermediates": nodes, "grads": gradients, _FROM_OUTPUTS: True}]


def _forget_history(outputs: Iterable[Any]) -> None:
    for output in outputs:
        if isinstance(output, torch.Tensor):
            with suppress(RuntimeError):  # a view keeps its history
                output.detach_()


def _failed(what: str, outputs: Any, gradients: Any, inputs: Any) -> RunError:
    return RunError(
        f"the {what} of a stage failed, with outputs {map_debug_info(outputs)}, output gradients "
        f"{map_debug_info(gradients)} and inputs {map_debug_info(inputs)}"
    )
