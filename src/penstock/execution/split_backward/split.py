"""The backward of a stage in two halves: the gradient of its inputs now, that of its weights later.

The autograd graph of a stage, from its outputs down to leaves, falls into two parts. Some nodes lead to an input; they
are what I runs, in one call of the engine. The others lead to parameters only, e.g. the transpose of a weight; they
are what W runs. Between them are the nodes of the first kind with an edge into the second: there the gradient of a
weight is made.

- For matrix products and convolutions making it is half of the work. I only keeps what it is made of: the gradient of
  the node's output, which a hook takes as the engine passes, and the operand that the node has saved. W multiplies.
- Anything else (the scale of a normalization, a bias that is added, a user's own Function) makes both gradients in one
  go. I keeps the result, which is as large as the parameter, and W adds it to ``.grad``.

So every node runs once, and when I returns, all that was saved and that W does not need is free. Where to cut depends
on the form of the graph only, which as a rule is the same for every microbatch: it is found once, and then a graph is
only compared with it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from penstock.errors import StageError
from penstock.execution.autograd import gradients_at, pop_gradients, run_backward, without_autocast
from penstock.execution.split_backward.backward_cut import BackwardCut
from penstock.execution.split_backward.leaf_gradients import LeafGradient, add_where_possible, is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from torch.autograd.graph import Node

    from penstock.execution.split_backward.weight_gradients import AddInPlace, Compute

    Gradients = Sequence[torch.Tensor | None]
    #: Where gradients of weights are added: an edge, or a leaf.
    Root = GradientEdge | torch.Tensor
    #: A node where W makes the gradients of weights: what gets the gradient of the node's output, what makes their
    #: gradients and the operand for it, the end of these among all that are made, whether no later one is for the
    #: same weights, so that they may get their gradients, and what adds them to which leaves, if that can be done in
    #: one. A bare tuple, since there are many.
    Product = tuple[list[torch.Tensor | None], Compute, Any, int, bool, "tuple[AddInPlace, list[LeafGradient]] | None"]

#: Bytes of gradients that are handed to the engine at once: about what the caches hold.
_FLUSH_BYTES: Final = 1 << 20
_REMEMBERED: Final = 8
_NOTHING: Final = nullcontext()
_needs_gradient: Final = attrgetter("requires_grad")
_version: Final = attrgetter("_version")


class SplitBackward:
    """Splits the backward of one stage, microbatch after microbatch.

    Hooks of tensors see what they see in a whole backward, once. A hook of a node (``grad_fn.register_hook``)
    of a matrix product or convolution sees the gradient of the input, and None in the place of a weight's; one of the
    node of a weight's transpose is not called.

    With `adds_in_place`, gradients of linear layers are added to ``.grad`` as they are made where no hook could see
    them. Do not set it where hooks are set in C++, as by ``DistributedDataParallel``, or where another thread may add
    to the same weights.

    >>> from torch.autograd.graph import get_gradient_edge
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

    __slots__ = ("_carrier", "_cuts", "_known", "_last", "adds_in_place")

    def __init__(self, *, adds_in_place: bool = False) -> None:
        self.adds_in_place = adds_in_place
        self._cuts: list[BackwardCut] = []
        self._last: BackwardCut | None = None  # the cut of the graph before
        self._known: dict[int, LeafGradient] = {}  # its leaves, by their places
        self._carrier = torch.empty(0)  # of hooks, on their way to a node

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without what is known of this one's graphs, e.g. with its stage."""
        return partial(SplitBackward, adds_in_place=self.adds_in_place), ()

    def before_whole_backward(self) -> None:
        """Note that a backward runs that is not split. Hooks that its forward has set do not outlive its graph."""
        for place in [place for place, leaf in self._known.items() if leaf.has_node_hooks]:
            del self._known[place]

    def end_step(self) -> None:
        """End a step: stop keeping nodes of leaves alive."""
        self._known.clear()

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
            self.before_whole_backward()
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
        """Find where this graph falls into two; None if it does not."""
        beginnings = list(dict.fromkeys(beginnings)) if len(beginnings) > 1 else beginnings
        for cut in self._cuts:
            nodes = cut.matched(beginnings, inputs)
            if nodes is not None:
                if cut.whole:
                    return None
                split = self._apply(cut, nodes)
                if split is not None:
                    return split
        cut, nodes = BackwardCut.of(beginnings, inputs, adds_in_place=self.adds_in_place)
        # Graphs of one form may differ in what can be cut, e.g. where saved tensors are elsewhere: try the most first.
        self._cuts = sorted([cut, *self._cuts][:_REMEMBERED], key=lambda one: -len(one.points.places))
        return None if cut.whole else self._apply(cut, nodes)

    def _apply(self, cut: BackwardCut, nodes: Sequence[Any]) -> _Split | None:
        """Cut the graph of one microbatch; None if something about its nodes forbids it."""
        points = cut.points
        at = [nodes[place] for place in points.places]
        targets: list[Any] = [
            _edge(at, *target) if isinstance(target, tuple) else nodes[target].variable for target in points.targets
        ]
        if any(targets[number].dim() != 1 for number in points.vectors):
            return None
        operands: list[Any] = [None] * len(at)
        for find, numbers in points.groups:
            found = find([at[number] for number in numbers])
            if found is None:
                return None
            for number, operand in zip(numbers, found, strict=True):
                operands[number] = operand
        adds, known = self._leaves(cut, nodes)
        outputs, watched = _capture_output_gradients(at, self._carrier), _tensors(operands)
        return _Split(
            [nodes[place] for place in cut.now],
            [nodes[place].variable for place in cut.leaves],
            known,
            list(zip(outputs, points.makes, operands, points.ends, points.complete, adds, strict=True)),
            targets,
            [nodes[place] for place in cut.keep],
            watched,
            list(map(_version, watched)),
        )

    def _leaves(
        self, cut: BackwardCut, nodes: Sequence[Any]
    ) -> tuple[list[tuple[AddInPlace, list[LeafGradient]] | None], list[LeafGradient]]:
        """Find what adds the gradients of each point to which leaves, and the leaves that get one in I.

        Nothing where that is left to the engine, also if it shall find anomalies.
        """
        adds = cut.points.adds
        if not self.adds_in_place or torch.is_anomaly_enabled():
            return [None] * len(adds), []
        if cut is not self._last:  # leaves of another graph may be in use no more
            self.end_step()
            self._last = cut
        return (
            [one and (one[0], [self._leaf(nodes, place) for place in one[1]]) for one in adds],
            [self._leaf(nodes, place) for place in cut.leaves],
        )

    def _leaf(self, nodes: Sequence[Any], place: int) -> LeafGradient:
        """Find the leaf at a place of a graph.

        It is known from one graph to the next as long as its node has no hooks: these must not outlive the graph.
        """
        leaf = self._known.get(place)
        if leaf is None or leaf.node is not nodes[place]:
            leaf = self._known[place] = LeafGradient(nodes[place])
        if leaf.has_node_hooks:
            del self._known[place]
        return leaf


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
        """Roots that lead to weights only, and their gradients; a split, and what I has found for its leaves."""
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
        roots: list[Root] = [_Edge(*root) for root in self._roots]
        gradients, split = list(self._gradients), self._split
        if split is not None:
            _check_unchanged(split.operands, split.versions)
            found = add_where_possible(split.known, self._found) if split.known else self._found
            there = [gradient is not None for gradient in found]
            roots += split.leaves if all(there) else list(compress(split.leaves, there))
            gradients += [gradient for gradient in found if gradient is not None]
        self._roots, self._gradients, self._split, self._found = (), (), None, ()
        if split is not None:
            roots, gradients = _compute_deferred(split, roots, gradients)
        if roots:
            _accumulate(roots, gradients)


def _compute_deferred(
    split: _Split, roots: list[Root], gradients: list[torch.Tensor]
) -> tuple[list[Root], list[torch.Tensor]]:
    """Make the gradients of products, and add some to ``.grad`` on the way; the others are returned, and for what."""
    targets = split.targets
    taken_to = size = end = 0  # how many of the targets are among the roots, or have been
    for output, make, operand, until, complete, adding in split.products:
        gradient = output.pop() if output else None
        if gradient is None or _is_added(adding, gradient, operand):
            roots += targets[taken_to:end]
            taken_to = until
        else:
            made = make(gradient, operand)
            gradients += made
            size += made[-1].nbytes
        end = until
        if size > _FLUSH_BYTES and complete:  # before they leave the caches
            _accumulate(roots + targets[taken_to:end], gradients)
            roots, gradients, size, taken_to = [], [], 0, end
    return roots + targets[taken_to:end], gradients


def _is_added(adding: tuple[AddInPlace, list[LeafGradient]] | None, gradient: torch.Tensor, operand: Any) -> bool:
    """Whether the gradients of a product could be added to their leaves as they are made. They are, then."""
    if adding is None or not is_plain(operand):
        return False
    add, leaves = adding
    for leaf in leaves:
        if not leaf.takes(gradient):
            return False
    add(gradient, operand, leaves)
    return True


def _accumulate(roots: list[Root], gradients: list[torch.Tensor]) -> None:
    """Add gradients to leaves, or to those that edges lead to.

    A leaf that no longer requires a gradient gets none, as in a full backward; the engine would refuse it. With one
    root, the engine reports to multi-tensor hooks that its node does not run; so there are two.
    """
    if not all(map(_needs_gradient, roots)):
        wanted = list(map(_needs_gradient, roots))
        roots, gradients = list(compress(roots, wanted)), list(compress(gradients, wanted))
    if len(roots) == 1:
        roots, gradients = [*roots, torch.zeros((), requires_grad=True)], [*gradients, torch.zeros(())]
    if roots:
        run_backward(roots, gradients)


class _Split(NamedTuple):
    """The graph of one microbatch, cut.

    Attributes:
        now: the nodes of roots from which I runs.
        leaves: those that get a gradient in I which is added in W.
        known: the same, if gradients may be added to them here.
        products: where W makes gradients.
        targets: what these gradients are for.
        keep: what must live until W.
        operands: tensors of which W makes gradients.
        versions: theirs in I.
    """

    now: list[Node]
    leaves: list[torch.Tensor]
    known: list[LeafGradient]
    products: list[Product]
    targets: list[Root]
    keep: list[Node]
    operands: list[torch.Tensor]
    versions: list[int]


def _tensors(operands: Sequence[Any]) -> list[torch.Tensor]:
    """List the tensors of which gradients are made; the operand of a convolution has two, and settings."""
    found: list[torch.Tensor] = []
    for operand in operands:
        if isinstance(operand, tuple):
            found += operand[:2]
        else:
            found.append(operand)
    return found


def _check_unchanged(operands: Sequence[torch.Tensor], versions: list[int]) -> None:
    """Raise if a tensor was modified in place since I, as autograd does for saved tensors."""
    if list(map(_version, operands)) == versions:
        return
    now = next(one for one, version in zip(operands, versions, strict=True) if one._version != version)
    raise StageError(
        f"a tensor of shape {tuple(now.shape)} was modified in place between the two halves of a backward (I and "
        "W), but W needs it for the gradient of a weight; modify a copy, or modify it after W"
    )


class _Edge(GradientEdge):
    """One that leads to weights, and can be asked what a leaf is asked."""

    requires_grad: Final = True


def _edge(nodes: Sequence[Node], number: int, edge: int) -> _Edge:
    return _Edge(*nodes[number].next_functions[edge])  # type: ignore[arg-type]  # it leads to a node


def _capture_output_gradients(nodes: Sequence[Any], carrier: torch.Tensor) -> list[list[torch.Tensor | None]]:
    """Capture the gradient of each node's output, when all hooks of that output have seen it.

    What the engine itself hands over for an edge is the gradient before the hooks. ``register_prehook`` would do, and
    take longer than all else that is done for a node.
    """
    outputs: list[list[torch.Tensor | None]] = [[] for _ in nodes]
    for node, output in zip(nodes, outputs, strict=True):
        carrier._backward_hooks = {0: output.append}
        node._register_hook_dict(carrier)
    carrier._backward_hooks = None
    return outputs


def _without_hooks(leaves: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Leaves without the hooks of their tensors: these see the gradient when it is added, in W."""
    hooked = [hooks for leaf in leaves if (hooks := leaf._backward_hooks)]
    return _hooks_removed(hooked) if hooked else _NOTHING


@contextmanager
def _hooks_removed(dictionaries: Sequence[dict[int, Any]]) -> Iterator[None]:
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
    """Run the full backward, for a graph that cannot be cut."""
    run_backward(roots, gradients)
    return pop_gradients(inputs)
