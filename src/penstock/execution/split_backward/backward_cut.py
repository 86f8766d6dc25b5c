"""Finds where to cut the autograd graph of a stage in two, from its form.

Some nodes lead to an input of the stage. The others lead to parameters only. Where an edge goes from the first to the
second, the gradient of a weight is made: by a rule, at a *point*; or, where there is no rule, by the node itself.
"""

from __future__ import annotations

from itertools import accumulate as running_sums
from typing import TYPE_CHECKING, Final, NamedTuple

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from penstock.execution.split_backward.graph_shape import LEAF, NOWHERE, GraphShape
from penstock.execution.split_backward.weight_gradients import find_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.autograd.graph import Node

    from penstock.execution.split_backward.weight_gradients import AddInPlace, Compute, Operands, WeightRule

#: Nodes that run a backward inside, and refuse to when the engine is asked for certain gradients only.
_OPAQUE: Final = frozenset({"CheckpointFunctionBackward"})


class DeferredNodes(NamedTuple):
    """Nodes where weights can get their gradients later, in columns.

    Attributes:
        places: the places of the nodes.
        groups: for nodes of one type, what finds their operands, and their numbers among the points.
        makes: for each what makes the gradients.
        targets: what the gradients are for: the place of a leaf; or the number of a point, and of an edge there.
        ends: for each point the end of its gradients in `targets`.
        vectors: the numbers of targets that must be leaves with one dimension.
        complete: for each whether no later one leads to the same weights, so that they may get their gradients.
        adds: for each what adds the gradients to its targets, where these are leaves, and their places.
    """

    places: list[int]
    groups: list[tuple[Operands, list[int]]]
    makes: list[Compute]
    targets: list[int | tuple[int, int]]
    ends: list[int]
    vectors: list[int]
    complete: list[bool]
    adds: list[tuple[AddInPlace, list[int]] | None]

    @classmethod
    def of(
        cls,
        points: dict[int, tuple[list[int], WeightRule]],
        below: list[list[int]],
        leaves: set[int],
        complete: list[bool],
    ) -> DeferredNodes:
        """From the numbers of edges and the rule at each place."""
        groups: dict[Operands, list[int]] = {}
        targets: list[int | tuple[int, int]] = []
        vectors = []
        adds = []
        for number, (place, (edges, rule)) in enumerate(points.items()):
            groups.setdefault(rule.operands, []).append(number)
            if rule.vector:
                vectors.append(len(targets))
            children = _at(below[place], edges)
            if rule.behind:
                (children[-1],) = below[children[-1]]
            targets += [
                child if child in leaves else (number, edge) for child, edge in zip(children, edges, strict=True)
            ]
            adds.append((rule.add, children) if rule.add and leaves.issuperset(children) else None)
        return cls(
            list(points),
            list(groups.items()),
            [rule.make for _, rule in points.values()],
            targets,
            list(running_sums(len(edges) for edges, _ in points.values())),
            vectors,
            complete,
            adds,
        )


class BackwardCut(NamedTuple):
    """Where graphs of one form are cut, all in places of the walk.

    Attributes:
        form: the form.
        inputs: the place of every input, or -1 for one that is not in the graph.
        now: roots from which the backward of inputs runs.
        leaves: the leaves that get a gradient in it.
        points: the points.
        keep: nodes that must live until the weights have their gradients: leaves, for the hooks that they may have;
            and points above nodes that are written in Python, which nothing else keeps alive.
        whole: whether it cannot be cut.
    """

    form: GraphShape
    inputs: list[int]
    now: list[int]
    leaves: list[int]
    points: DeferredNodes
    keep: list[int]
    whole: bool

    @classmethod
    def of(
        cls, beginnings: list[Node], inputs: Sequence[torch.Tensor], *, adds_in_place: bool = False
    ) -> tuple[BackwardCut, list[Node]]:
        """Find where to cut the graph below some nodes; and its nodes.

        `adds_in_place` is whether gradients may be added to leaves here. O(edges), and once more the part of weights
        for each point that shares it.
        """
        form, nodes, below = GraphShape.of(beginnings)
        places = {node: place for place, node in enumerate(nodes)}
        ends = [places.get(get_gradient_edge(tensor).node, NOWHERE) for tensor in inputs]
        kept = _above({place for place in ends if place >= 0}, below)
        points, combined = _points(nodes, below, kept, adds_in_place=adds_in_place)
        roots = range(len(beginnings))
        begins = {root: [root] for root in roots if root not in kept} | {
            place: [below[place][number] for number in numbers] for place, (numbers, _) in points.items()
        }
        reached = {place: _reached(children, below) for place, children in begins.items()}
        inner = _reached(combined, below)
        now = [root for root in roots if root in kept]
        for place in _meeting(inner, reached, set(points), below):
            if points.pop(place, None) is None:
                now.append(place)
        roots_later = set[int]().union(*(nodes for place, nodes in reached.items() if place not in points))
        complete = _complete(roots_later, [reached[place] for place in points])
        leaves = {place for place, kind in enumerate(form.kinds) if kind.__name__ == LEAF}
        python = {place for place, kind in enumerate(form.kinds) if issubclass(kind, BackwardCFunction)}
        above = [place for place, (numbers, _) in points.items() if not python.isdisjoint(_at(below[place], numbers))]
        cut = cls(
            form,
            ends,
            now,
            sorted(inner & leaves),
            DeferredNodes.of(points, below, leaves, complete),
            sorted(leaves.difference(ends)) + above,
            any(form.kinds[place].__name__ in _OPAQUE for place in kept | inner),
        )
        return cut, nodes

    def matched(self, beginnings: list[Node], inputs: Sequence[torch.Tensor]) -> list[Node] | None:
        """Find the nodes of another graph, if it has this form and the inputs are in their places."""
        nodes = self.form.matched(beginnings)
        if nodes is None or len(inputs) != len(self.inputs):
            return None
        for place, tensor in zip(self.inputs, inputs, strict=True):
            if place < 0:
                if get_gradient_edge(tensor).node in nodes:
                    return None
            elif nodes[place].variable is not tensor:  # type: ignore[attr-defined]
                return None
        return nodes


def _points(
    nodes: list[Node], below: list[list[int]], kept: set[int], *, adds_in_place: bool
) -> tuple[dict[int, tuple[list[int], WeightRule]], list[int]]:
    """Find where there are rules, by the numbers of edges; and the children that their nodes make gradients for.

    `kept` are the nodes that lead to an input.
    """
    points: dict[int, tuple[list[int], WeightRule]] = {}
    combined: list[int] = []
    for place in sorted(kept):
        numbers = [number for number, child in enumerate(below[place]) if child >= 0 and child not in kept]
        if not numbers:
            continue
        rule = find_rule(nodes[place], numbers, adds_in_place=adds_in_place)
        if rule is not None and rule.operands([nodes[place]]) is not None:
            points[place] = numbers, rule
        else:
            combined += _at(below[place], numbers)
    return points, combined


def _meeting(inner: set[int], reached: dict[int, set[int]], points: set[int], below: list[list[int]]) -> list[int]:
    """Take what meets the part of weights that the backward of inputs passes out of `reached`, into `inner`.

    The engine follows every way to a leaf that is wanted, and can pass a node once. So a point must not share anything
    with that part; and a root from which only weights are reached no nodes, but it may add to the same leaves.
    """
    taken: list[int] = []
    while meeting := [
        place for place, nodes in reached.items() if any(place in points or below[node] for node in nodes & inner)
    ]:
        for place in meeting:
            inner |= reached.pop(place)
        taken += meeting
    return taken


def _above(places: set[int], below: list[list[int]]) -> set[int]:
    """Find all places from which one of these can be reached."""
    parents: list[list[int]] = [[] for _ in below]
    for place, children in enumerate(below):
        for child in children:
            if child >= 0:
                parents[child].append(place)
    return _reached(list(places), parents)


def _reached(places: list[int], below: list[list[int]]) -> set[int]:
    """Find all places that can be reached from these, and these themselves."""
    found: set[int] = set()
    stack = list(places)
    while stack:
        place = stack.pop()
        if place not in found:
            found.add(place)
            stack += [child for child in below[place] if child >= 0]
    return found


def _complete(before: set[int], reached: Sequence[set[int]]) -> list[bool]:
    """For each of some sets whether no element of it, or of one before it, is in one after it."""
    last = {node: index for index, nodes in enumerate(reached) for node in nodes}
    until = max((last.get(node, 0) for node in before), default=0)
    complete = []
    for index, nodes in enumerate(reached):
        until = max([until, *(last[node] for node in nodes)])
        complete.append(until <= index)
    return complete


def _at(children: list[int], numbers: list[int]) -> list[int]:
    return [children[number] for number in numbers]
