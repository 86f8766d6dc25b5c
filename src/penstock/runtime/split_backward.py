"""The backward of a stage in two halves: the gradient of its inputs now, that of its weights later.

The autograd graph of a stage, from its outputs down to leaves, falls into two parts. Some nodes lead to an input; they
are what I runs, in one call of the engine. The others lead to parameters alone, e.g. the transpose of a weight; they
are what W runs. Between them are the nodes of the first kind with an edge into the second: there the gradient of a
weight is made.

- For matrix products and convolutions making it is half of the work. I only keeps what it is made of: the gradient of
  the node's output, which a hook takes as the engine passes, and the operand that the node has saved. W multiplies.
- Anything else (the scale of a normalization, a bias that is added, a user's own Function) makes both gradients in one
  go. I keeps the result, which is as large as the parameter, and W adds it to ``.grad``.

So every node runs once, and when I returns, all that was saved and that W does not need is free. Where to cut depends
on the form of the graph alone, which as a rule is the same for every microbatch: it is found once, and then a graph is
only compared with it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate as running_sums
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.graph.heap import keep_freed_memory
from penstock.runtime.engine import accumulate, gradients_at, taken, without_autocast
from penstock.runtime.products import rule_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from torch.autograd.graph import Node

    from penstock.runtime.products import Make, Rule

    Gradients = Sequence[torch.Tensor | None]
    #: The edges of a node.
    Row = tuple[tuple[Node | None, int], ...]
    #: A node where W makes the gradients of weights: what gets the gradient of the node's output, what makes their
    #: gradients and the operand for it, the end of the edges to these weights among all such edges, and whether no
    #: later point leads to the same weights, so that they may get their gradients. A bare tuple, since there are many.
    Point = tuple[list[torch.Tensor | None], Make, Any, int, bool]

#: Nodes that run a backward of their own inside, and refuse to when the engine is asked for certain gradients only.
_OPAQUE: Final = frozenset({"CheckpointFunctionBackward"})
#: The node of a leaf.
_LEAF: Final = "AccumulateGrad"
#: Bytes of gradients that are handed to the engine at once: about what the caches hold.
_ENOUGH: Final = 1 << 20
_REMEMBERED: Final = 8
_NONE: Final = -1
_ONLY: Final = [0]
_NOTHING: Final = nullcontext()
#: Makes a ``GradientEdge`` in half the time that the type itself takes; there is one for every weight and microbatch.
_new: Final = tuple.__new__


class SplitBackward:
    """Splits the backward of one stage, microbatch after microbatch.

    Hooks of tensors see what they see in a whole backward, once. A hook of a node (``grad_fn.register_hook``)
    of a matrix product or convolution sees the gradient of the input, and None in the place of a weight's.

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

    __slots__ = ("_carrier", "_cuts")

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []
        self._carrier = torch.empty(0)  # of hooks, on their way to a node
        keep_freed_memory()  # what I keeps for W is freed by W, and needed by the next I

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
        split = self._split([root.node for root in roots], inputs)
        if split is None:
            return _in_one_piece(roots, gradients, inputs), WeightBackward()
        now = [root.node in split.now for root in roots]
        split.now.clear()  # all else of the split lives until W
        later: tuple[Sequence[GradientEdge], Sequence[torch.Tensor]] = (), ()
        if not all(now):
            after = [not one for one in now]
            later = list(compress(roots, after)), list(compress(gradients, after))
            roots, gradients = list(compress(roots, now)), list(compress(gradients, now))
        with _without_hooks(split.leaves):
            found = gradients_at(roots, gradients, [*inputs, *split.leaves])
        count = len(inputs)
        return list(found[:count]), WeightBackward(*later, split, found[count:])

    def _split(self, beginnings: list[Node], inputs: Sequence[torch.Tensor]) -> _Split | None:
        """Where this graph falls into two; None if it does not."""
        beginnings = list(dict.fromkeys(beginnings)) if len(beginnings) > 1 else beginnings
        for cut in self._cuts:
            graph = cut.form.matched(beginnings)
            if graph is not None and cut.ends_at(graph, inputs):
                if cut.whole:
                    return None
                split = _applied(cut, graph, self._carrier)
                if split is not None:
                    return split
        form, graph, below = _Form.of(beginnings)
        cut = _cut(form, graph, below, len(beginnings), [get_gradient_edge(tensor).node for tensor in inputs])
        # Graphs of one form may differ in what can be cut, e.g. where saved tensors are elsewhere: try the most first.
        self._cuts = sorted([cut, *self._cuts][:_REMEMBERED], key=lambda one: -len(one.points))
        return None if cut.whole else _applied(cut, graph, self._carrier)


class WeightBackward:
    """What is left of a backward when the inputs have their gradients. Call it once."""

    __slots__ = ("_found", "_gradients", "_roots", "_split")

    def __init__(
        self,
        roots: Sequence[GradientEdge] = (),
        gradients: Sequence[torch.Tensor] = (),
        split: _Split | None = None,
        found: Gradients = (),
    ) -> None:
        """Roots that lead to weights alone, and their gradients; a split, and what I has found for its leaves."""
        self._roots = roots
        self._gradients = gradients
        self._split = split
        self._found = found

    def __call__(self) -> None:
        """Add the gradients of the weights to their ``.grad``."""
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as no_grad does, which takes as long as a small product
        try:
            with without_autocast():
                self._add()
        finally:
            torch._C._set_grad_enabled(enabled)

    def _add(self) -> None:
        edges, gradients, split = list(self._roots), list(self._gradients), self._split
        if split is not None:
            there = [gradient is not None for gradient in self._found]
            edges += split.leaves if all(there) else compress(split.leaves, there)
            gradients += [gradient for gradient in self._found if gradient is not None]
        self._roots, self._gradients, self._split, self._found = (), (), None, ()
        if split is not None:
            edges, gradients = _multiplied(split, edges, gradients)
        if edges:
            accumulate(edges, gradients)


def _multiplied(
    split: _Split, edges: list[GradientEdge], gradients: list[torch.Tensor]
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Make the gradients at points; those that have not been added to ``.grad`` on the way are returned."""
    below = split.below
    taken_to = size = end = 0  # how many edges of `below` are among `edges`, or have been
    for output, make, operand, until, complete in split.points:
        if output and (gradient := output.pop()) is not None:
            made = make(gradient, operand)
            gradients += made
            size += made[-1].nbytes
        else:
            edges += below[taken_to:end]
            taken_to = until
        end = until
        if size > _ENOUGH and complete:  # before they leave the caches
            accumulate(edges + below[taken_to:end], gradients)
            edges, gradients, size, taken_to = [], [], 0, end
    return edges + below[taken_to:end], gradients


class _Split(NamedTuple):
    """The graph of one microbatch, cut.

    Attributes:
        now: the nodes of roots from which I runs.
        leaves: those that get a gradient in I which is added in W.
        points: where W makes gradients.
        below: the edges for these gradients.
        keep: what must live until W: nodes above such that are written in Python, which do not live by themselves.
    """

    now: list[Node]
    leaves: list[GradientEdge]
    points: list[Point]
    below: list[GradientEdge]
    keep: list[Node]


class _Graph(NamedTuple):
    """The graph of one microbatch: its nodes in the order of a walk, and the edges of those that have several."""

    nodes: list[Node]
    rows: list[Row]


class _Form(NamedTuple):
    """The form of a graph: what a walk comes upon.

    Attributes:
        kinds: the types of the nodes.
        inner: the places of nodes that are no leaves, each with the numbers of its edges to nodes not seen before; this
            is `_ONLY`, the very list, for a node that has no other edge.
        lengths: how many edges each of the others has.
        known: edges to nodes seen before or nowhere: the number of the row, that of the edge in it, and the place that
            it leads to, or -1.
    """

    kinds: list[type]
    inner: list[tuple[int, list[int]]]
    lengths: list[int]
    known: list[tuple[int, int, int]]

    @classmethod
    def of(cls, beginnings: list[Node]) -> tuple[_Form, _Graph, list[list[int]]]:
        """The form of the graph below some nodes, the graph, and for every node the places of its children. O(edges).

        The place is -1 where there is no child.
        """
        nodes = list(beginnings)
        seen: dict[Node | None, int] = {node: place for place, node in enumerate(nodes)} | {None: _NONE}
        form = cls([], [], [], [])
        rows: list[Row] = []
        below: list[list[int]] = []
        for place, node in enumerate(nodes):
            form.kinds.append(type(node))
            if type(node).__name__ == _LEAF:
                below.append([])
                continue
            row = node.next_functions
            new = []
            for number, (child, _) in enumerate(row):
                if child is None or child in seen:
                    form.known.append((len(rows), number, seen[child]))
                else:
                    seen[child] = len(nodes)
                    nodes.append(child)
                    new.append(number)
            below.append([seen[child] for child, _ in row])
            if new == _ONLY and len(row) == 1:
                form.inner.append((place, _ONLY))
            else:
                form.inner.append((place, new))
                form.lengths.append(len(row))
                rows.append(row)
        return form, _Graph(nodes, rows), below

    def matched(self, beginnings: list[Node]) -> _Graph | None:
        """Another graph, if it has this form. O(edges).

        The walk takes the form for granted, and most of what it has come upon is compared at the end, all at once.
        """
        nodes: list[Any] = list(beginnings)
        rows: list[Row] = []
        add = nodes.append
        try:
            for place, new in self.inner:
                row = nodes[place].next_functions
                if new is _ONLY:  # most often
                    ((child, _),) = row
                    add(child)
                else:
                    rows.append(row)
                    for number in new:
                        add(row[number][0])
        except (AttributeError, IndexError, ValueError):  # no node, or another number of edges
            return None
        if list(map(type, nodes)) != self.kinds or list(map(len, rows)) != self.lengths:
            return None
        for row_number, number, place in self.known:
            if rows[row_number][number][0] is not (None if place < 0 else nodes[place]):
                return None
        return _Graph(nodes, rows) if len(set(nodes)) == len(nodes) else None


class _Cut(NamedTuple):
    """Where graphs of one form are cut, all in places of the walk.

    Attributes:
        form: the form.
        inputs: the place of every input, or -1 for one that is not in the graph.
        now: roots from which I runs.
        leaves: the leaves that get a gradient in I which is added in W.
        points: nodes of products.
        below: the edges of all these that lead into the part of W: the number of the row, and that of the edge in it.
        keep: those of them that must live until W.
        whole: whether it cannot be cut.
    """

    form: _Form
    inputs: list[int]
    now: list[int]
    leaves: list[int]
    points: list[_Place]
    below: list[tuple[int, int]]
    keep: list[int]
    whole: bool

    def ends_at(self, graph: _Graph, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the inputs are in their places."""
        nodes = graph.nodes
        return len(inputs) == len(self.inputs) and all(
            nodes[place].variable is tensor  # type: ignore[attr-defined]
            if place >= 0
            else get_gradient_edge(tensor).node not in nodes
            for place, tensor in zip(self.inputs, inputs, strict=True)
        )


class _Place(NamedTuple):
    """Where a point is.

    Attributes:
        node: the place of the node.
        rule: how to make gradients for those of its edges that lead into the part of W.
        until: see ``Point``.
        complete: see there.
    """

    node: int
    rule: Rule
    until: int
    complete: bool


def _cut(form: _Form, graph: _Graph, below: list[list[int]], roots: int, ends: list[Node]) -> _Cut:
    """Find where to cut. O(edges), and once more the part of W for each point that shares it."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    inputs = [places.get(node, _NONE) for node in ends]
    kept = _above({place for place in inputs if place >= 0}, below)
    begins: dict[int, list[int]] = {root: [root] for root in range(roots) if root not in kept}
    points: dict[int, tuple[list[int], Rule]] = {}
    combined: list[int] = []
    for place in sorted(kept):
        numbers = [number for number, child in enumerate(below[place]) if child >= 0 and child not in kept]
        if not numbers:
            continue
        children = [below[place][number] for number in numbers]
        rule = rule_for(form.kinds[place].__name__, numbers)
        if rule is not None and rule(graph.nodes[place]) is not None:
            points[place] = numbers, rule
            begins[place] = children
        else:
            combined += children
    now = [root for root in range(roots) if root in kept]
    reached = {place: _reached(children, below) for place, children in begins.items()}
    inner = _reached(combined, below)
    for place in _meeting(inner, reached, set(points), below):
        if points.pop(place, None) is None:
            now.append(place)
    leaves = [place for place in sorted(inner) if form.kinds[place].__name__ == _LEAF]
    rows = {place: row for row, place in enumerate(place for place, new in form.inner if new is not _ONLY)}
    roots_later = set[int]().union(*(nodes for place, nodes in reached.items() if place not in points))
    python = {place for place, kind in enumerate(form.kinds) if issubclass(kind, BackwardCFunction)}
    ends_of_edges = running_sums(len(numbers) for numbers, _ in points.values())
    complete = _complete(roots_later, [reached[place] for place in points])
    return _Cut(
        form,
        inputs,
        now,
        leaves,
        [
            _Place(place, rule, until, last)
            for (place, (_, rule)), until, last in zip(points.items(), ends_of_edges, complete, strict=True)
        ],
        [(rows[place], number) for place, (numbers, _) in points.items() for number in numbers],
        [place for place, (numbers, _) in points.items() if any(below[place][number] in python for number in numbers)],
        any(form.kinds[place].__name__ in _OPAQUE for place in kept | inner),
    )


def _meeting(inner: set[int], reached: dict[int, set[int]], points: set[int], below: list[list[int]]) -> list[int]:
    """Take what meets the part of weights that I passes out of `reached`, into `inner`.

    The engine follows every way from I to a leaf that is wanted, and can pass a node once. So a point must not share
    anything with that part; and a root of W no nodes, but it may add to the same leaves.
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
    """All from which one of the places can be reached."""
    parents: list[list[int]] = [[] for _ in below]
    for place, children in enumerate(below):
        for child in children:
            if child >= 0:
                parents[child].append(place)
    return _reached(list(places), parents)


def _reached(places: list[int], below: list[list[int]]) -> set[int]:
    """All that can be reached from the places, and they themselves."""
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


def _applied(cut: _Cut, graph: _Graph, carrier: torch.Tensor) -> _Split | None:
    """The cut of one microbatch's graph; None if something about its nodes forbids it."""
    nodes, rows = graph
    points: list[Point] = []
    for place, rule, until, complete in cut.points:
        product = rule(nodes[place])
        if product is None:
            return None
        points.append(([], *product, until, complete))
    _hand_over([nodes[place] for place, *_ in cut.points], points, carrier)
    return _Split(
        [nodes[place] for place in cut.now],
        [_new(GradientEdge, (nodes[place], 0, None)) for place in cut.leaves],
        points,
        [_new(GradientEdge, (*rows[row][number], None)) for row, number in cut.below],
        [nodes[place] for place in cut.keep],
    )


def _hand_over(nodes: Sequence[Any], points: Sequence[Point], carrier: torch.Tensor) -> None:
    """Have each point get the gradient of a node's output, when all hooks of that output have seen it.

    What the engine itself hands over for an edge is the gradient before the hooks. ``register_prehook`` would do, and
    take longer than all else that is done for a node.
    """
    for node, point in zip(nodes, points, strict=True):
        carrier._backward_hooks = {0: point[0].append}
        node._register_hook_dict(carrier)
    carrier._backward_hooks = None


def _without_hooks(leaves: Sequence[GradientEdge]) -> AbstractContextManager[None]:
    """Leaves without the hooks of their tensors: these see the gradient when it is added, in W."""
    hooked = [hooks for leaf in leaves if (hooks := leaf.node.variable._backward_hooks)]  # type: ignore[attr-defined]
    return _emptied(hooked) if hooked else _NOTHING


@contextmanager
def _emptied(dictionaries: Sequence[dict[int, Any]]) -> Iterator[None]:
    kept = [dict(one) for one in dictionaries]
    for one in dictionaries:
        one.clear()
    try:
        yield
    finally:
        for one, entries in zip(dictionaries, kept, strict=True):
            one.update(entries)


def _in_one_piece(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The whole backward, for a graph that cannot be cut."""
    accumulate(roots, gradients)
    return taken(inputs)
