"""Cuts the graph of a model at its marks: which nodes make which part, and what goes from part to part."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.models.tracing.marks import is_mark
from penstock.models.tracing.mutations import replace_mutations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx


class Part(NamedTuple):
    """A part of a graph.

    Attributes:
        nodes: what it runs.
        inputs: the arguments of the model and the values of earlier parts that it uses, in the order of use.
        outputs: what later parts and the model's output use of it, in the order of use.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]


def cut(graph: fx.Graph, ignored: set[fx.Node]) -> list[Part]:
    """Return the parts of a graph, none of them empty; ``ignored`` are nodes that belong to none.

    What no other part uses would be a stage that sends nothing: it joins the part before. What a part changes in place
    of another one is replaced.
    """
    pieces: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if is_mark(node):
            pieces.append([])
        elif node.op not in ("placeholder", "get_attr", "output") and node not in ignored:
            pieces[-1].append(node)
    kept: list[list[fx.Node]] = []
    joins: list[fx.Node] = []
    for piece in reversed(pieces):
        piece += joins
        is_used = _is_used_elsewhere(piece)
        joins = [] if is_used else piece
        if is_used:
            kept.insert(0, piece)
    if not kept:
        kept = [[]]
    kept[0][:0] = joins
    replace_mutations(kept)
    return _connected(kept, graph.output_node())


def _is_used_elsewhere(piece: Sequence[fx.Node]) -> bool:
    own = set(piece)
    return any(user not in own for node in piece for user in node.users)


def _connected(pieces: Sequence[Sequence[fx.Node]], output: fx.Node) -> list[Part]:
    home = {node: number for number, piece in enumerate(pieces) for node in piece}
    inputs: list[dict[fx.Node, None]] = [{} for _ in pieces]
    outputs: list[dict[fx.Node, None]] = [{} for _ in pieces]
    for number, piece in enumerate(pieces):
        for node in piece:
            for value in node.all_input_nodes:
                if value.op != "get_attr" and home.get(value) != number:
                    inputs[number][value] = None
                    if value in home:
                        outputs[home[value]][value] = None
    for value in output.all_input_nodes:
        if value.op != "placeholder":  # a parameter that is an output comes from the last part
            outputs[home.get(value, len(pieces) - 1)][value] = None
    return [Part(*part) for part in zip(pieces, map(list, inputs), map(list, outputs), strict=True)]
