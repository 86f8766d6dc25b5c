"""The backward of a stage in two halves: the gradient of its inputs now, that of its weights later.

The autograd graph of a stage, from its outputs down to leaves, falls into two parts. Some nodes lead to an input; they
are what I runs, in one call of the engine. The others lead to parameters alone, e.g. the transpose of a weight; they
are what W runs. Between them are the nodes of the first kind with an edge into the second: there the gradient of a
weight is made.

- For matrix products and convolutions making it is half of the work. I only keeps what it is made of: the gradient of
  the node's output, which the engine hands over as it passes, and the operand that the node has saved. W multiplies.
- Anything else (the scale of a normalization, a bias that is added, a user's own Function) makes both gradients in one
  go. I keeps the result, which is as large as the parameter, and W adds it to ``.grad``.

So every node runs once, and when I returns, all that was saved and that W does not need is free. Where to cut depends
on the form of the graph alone, which as a rule is the same for every microbatch: it is found once, and then a graph is
only compared with it.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.runtime.engine import accumulate, gradients_at
from penstock.runtime.products import PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import Node

    from penstock.runtime.products import Product, Rule

    Gradients = Sequence[torch.Tensor | None]

#: Nodes that run a backward of their own inside, which reaches parameters that the graph does not show.
_OPAQUE: Final = frozenset({"CheckpointFunctionBackward"})
#: Bytes of gradients that are handed to the engine at once: about what the caches hold.
_ENOUGH: Final = 1 << 20
_REMEMBERED: Final = 8
_NEW: Final = -1
_NONE: Final = -2


class SplitBackward:
    """Splits the backward of one stage, microbatch after microbatch.

    >>> layer = torch.nn.Linear(2, 2)
    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> roots = [get_gradient_edge(layer(x))]
    >>> (gradient,), weight_backward = SplitBackward().input_backward(roots, [torch.ones(1, 2)], [x])
    >>> gradient.shape, layer.weight.grad
    (torch.Size([1, 2]), None)
    >>> weight_backward()
    >>> layer.weight.grad
    tensor([[1., 1.],
            [1., 1.]])
    """

    __slots__ = ("_cuts",)

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []

    def input_backward(
        self, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], WeightBackward]:
        """Run the half of a backward that leads to the inputs.

        Args:
            roots: where the graph begins: an edge for each output that needs a gradient.
            gradients: the gradient of each of these outputs.
            inputs: leaves of the graph whose gradients are wanted now.

        Returns:
            The gradients of the inputs (None for one that no output depends on), and what is left to do. The graph
            cannot be run again.
        """
        if not inputs:
            return [], WeightBackward(roots, gradients)
        leaves = [get_gradient_edge(tensor) for tensor in inputs]
        split = self._split(roots, leaves)
        if split is None:
            return _in_one_piece(roots, gradients, inputs), WeightBackward()
        taken = len(inputs) + len(split.leaves)
        found = gradients_at(
            list(compress(roots, split.now)),
            list(compress(gradients, split.now)),
            [*leaves, *split.leaves, *[point.at for point in split.points]],
        )
        later = [not now for now in split.now]
        left = WeightBackward(
            [*split.leaves, *compress(roots, later)],
            [*found[len(inputs) : taken], *compress(gradients, later)],
            split.points,
            found[taken:],
            keep=roots if split.in_python else (),
        )
        return list(found[: len(inputs)]), left

    def _split(self, roots: Sequence[GradientEdge], inputs: Sequence[GradientEdge]) -> _Split | None:
        """Where this graph falls into two; None if it does not."""
        beginnings = [root.node for root in roots]
        ends = [edge.node for edge in inputs]
        for cut in self._cuts:
            nodes = cut.form.matched(beginnings)
            if nodes is not None and cut.ends(nodes) == ends:
                return _applied(cut, nodes)
        form, nodes = _Form.of(beginnings)
        cut = _cut(form, nodes, len(beginnings), ends)
        self._cuts = [cut, *self._cuts][:_REMEMBERED]
        return _applied(cut, nodes)


class WeightBackward:
    """What is left of a backward when the inputs have their gradients. Call it once."""

    __slots__ = ("_edges", "_gradients", "_keep", "_outputs", "_points")

    def __init__(
        self,
        edges: Sequence[GradientEdge] = (),
        gradients: Gradients = (),
        points: Sequence[_Point] = (),
        outputs: Gradients = (),
        *,
        keep: object = None,
    ) -> None:
        """Gradients for edges, and points with the gradients of their outputs; `keep` lives until the call."""
        self._edges = edges
        self._gradients = gradients
        self._points = points
        self._outputs = outputs
        self._keep = keep

    def __call__(self) -> None:
        """Add the gradients of the weights to their ``.grad``."""
        points, outputs = self._points, self._outputs
        edges = [edge for edge, gradient in zip(self._edges, self._gradients, strict=True) if gradient is not None]
        gradients = [gradient for gradient in self._gradients if gradient is not None]
        self._edges, self._gradients, self._points, self._outputs = (), (), (), ()
        size = 0
        with torch.no_grad():
            for point, output in zip(points, outputs, strict=True):
                if output is None:
                    continue
                edges += point.edges
                made = point.product(output)
                gradients += made
                size += made[-1].nbytes
                if size > _ENOUGH:  # before they leave the caches
                    accumulate(edges, gradients)
                    edges, gradients, size = [], [], 0
        if edges:
            accumulate(edges, gradients)
        self._keep = None


class _Point(NamedTuple):
    """A node where W makes the gradients of weights: of which output, for which edges, and how."""

    at: GradientEdge
    edges: list[GradientEdge]
    product: Product


class _Split(NamedTuple):
    """The graph of one microbatch, cut.

    Attributes:
        now: for every root, whether I runs from it.
        leaves: those that get a gradient in I which is added in W.
        points: where W makes gradients.
        in_python: whether a node of W is written in Python; such a node lives only as long as a tensor above it.
    """

    now: list[bool]
    leaves: list[GradientEdge]
    points: list[_Point]
    in_python: bool


class _Form(NamedTuple):
    """The form of a graph: the types of its nodes as a walk comes upon them, and for every edge where it leads.

    An edge leads to a node that the walk has not seen (and which is the next to be counted), to one that it has, or
    nowhere.
    """

    kinds: list[type]
    links: list[list[int]]

    @classmethod
    def of(cls, beginnings: list[Node]) -> tuple[_Form, list[Node]]:
        """The form of the graph below some nodes, and its nodes in the order of the walk. O(edges)."""
        nodes = list(beginnings)
        seen = {node: index for index, node in enumerate(nodes)}
        links = []
        for node in nodes:
            found = []
            for child, _ in node.next_functions:
                found.append(_NONE if child is None else seen.get(child, _NEW))
                if child is not None and child not in seen:
                    seen[child] = len(nodes)
                    nodes.append(child)
            links.append(found)
        return cls([type(node) for node in nodes], links), nodes

    def matched(self, beginnings: list[Node]) -> list[Node] | None:
        """The nodes of another graph in the order of the walk, if it has this form. O(edges)."""
        nodes: list[Node | None] = list(beginnings)
        for node, kind, links in zip(nodes, self.kinds, self.links, strict=False):
            if type(node) is not kind:
                return None
            edges = node.next_functions  # type: ignore[union-attr]
            if len(edges) != len(links):
                return None
            for (child, _), link in zip(edges, links, strict=True):
                if link == _NEW:
                    nodes.append(child)
                elif child is not (None if link == _NONE else nodes[link]):
                    return None
        same = len(nodes) == len(self.kinds) == len(set(nodes))
        return cast("list[Node]", nodes) if same else None


class _Cut(NamedTuple):
    """Where graphs of one form are cut, all in places of the walk.

    Attributes:
        form: the form.
        inputs: the place of every input, or -1 for one that is not in the graph.
        now: for every root, whether I runs from it.
        leaves: the leaves that get a gradient in I which is added in W.
        points: nodes of products, each with the numbers of its edges into the part of W, and the rule.
        whole: whether it cannot be cut.
    """

    form: _Form
    inputs: list[int]
    now: list[bool]
    leaves: list[int]
    points: list[tuple[int, list[int], Rule]]
    whole: bool

    def ends(self, nodes: list[Node]) -> list[Node | None]:
        """The nodes in the places of the inputs."""
        return [nodes[place] if place >= 0 else None for place in self.inputs]


def _cut(form: _Form, nodes: list[Node], roots: int, inputs: list[Node]) -> _Cut:
    """Find where to cut. O(edges)."""
    below = _children(form)
    places = [nodes.index(node) if node in nodes else -1 for node in inputs]
    kept = _above({place for place in places if place >= 0}, below)
    points: list[tuple[int, list[int], Rule]] = []
    combined: list[int] = []
    later: list[int] = []
    whole = False
    for place in sorted(kept):
        edges = [number for number, child in enumerate(below[place]) if child >= 0 and child not in kept]
        if not edges:
            continue
        name = form.kinds[place].__name__
        whole = whole or name in _OPAQUE
        rule = PRODUCTS.get(name)
        if rule is not None and rule(nodes[place], edges) is not None:
            points.append((place, edges, rule))
            later += [below[place][number] for number in edges]
        else:
            combined += [below[place][number] for number in edges]
    inner, leaves = _reached(combined, below)
    # The engine must not pass a node twice, once in I and once in W.
    whole = whole or bool(inner & _reached(later, below)[0])
    return _Cut(form, places, [place in kept for place in range(roots)], leaves, points, whole)


def _children(form: _Form) -> list[list[int]]:
    """For every node the places of its children, -2 for none."""
    count = len(form.links) - sum(links.count(_NEW) for links in form.links)
    children = []
    for links in form.links:
        row = []
        for link in links:
            row.append(count if link == _NEW else link)
            count += link == _NEW
        children.append(row)
    return children


def _above(places: set[int], below: list[list[int]]) -> set[int]:
    """All from which one of the places can be reached."""
    parents: list[list[int]] = [[] for _ in below]
    for place, children in enumerate(below):
        for child in children:
            if child >= 0:
                parents[child].append(place)
    found: set[int] = set()
    stack = list(places)
    while stack:
        place = stack.pop()
        if place not in found:
            found.add(place)
            stack += parents[place]
    return found


def _reached(places: list[int], below: list[list[int]]) -> tuple[set[int], list[int]]:
    """What can be reached from the places: nodes with edges of their own, and leaves."""
    found: set[int] = set()
    stack = list(places)
    while stack:
        place = stack.pop()
        if place not in found:
            found.add(place)
            stack += [child for child in below[place] if child >= 0]
    leaves = sorted(place for place in found if not below[place])
    return found.difference(leaves), leaves


def _applied(cut: _Cut, nodes: list[Node]) -> _Split | None:
    """The cut of one microbatch's graph; None if something about its nodes forbids it."""
    if cut.whole:
        return None
    for place in cut.leaves:
        # A hook would see the gradient twice: when it is taken in I, and when it is put back in W.
        if nodes[place].variable._backward_hooks:  # type: ignore[attr-defined]
            return None
    points = []
    in_python = False
    for place, numbers, rule in cut.points:
        node = nodes[place]
        product = rule(node, numbers)
        if product is None:
            return None
        edges = node.next_functions
        in_python = in_python or any(isinstance(edges[number][0], BackwardCFunction) for number in numbers)
        below = [GradientEdge(*edges[number]) for number in numbers]  # type: ignore[arg-type]
        points.append(_Point(GradientEdge(node, 0), below, product))
    return _Split(cut.now, [GradientEdge(nodes[place], 0) for place in cut.leaves], points, in_python)


def _in_one_piece(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The whole backward, for a graph that cannot be cut."""
    accumulate(roots, gradients)
    found = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return found
