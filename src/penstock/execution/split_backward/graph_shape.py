"""The form of an autograd graph: what a walk through it comes upon.

Usually the graph of a stage has the same form for every microbatch. What depends on the form only is found once;
each further graph is only compared with that form, which takes a few hundred nanoseconds per node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from typing import Any

    from torch.autograd.graph import Node

    #: The edges of a node.
    Row = tuple[tuple[Node | None, int], ...]
    #: How the walk goes on from a node: how many edges there are, the numbers of those to nodes not seen before, and
    #: those of the others with the place that they lead to, or -1 for nowhere.
    Step = tuple[int, list[int], list[tuple[int, int]]]

#: The type of a leaf's node.
LEAF: Final = "AccumulateGrad"
#: The place of what is not in the graph.
NOWHERE: Final = -1
#: The step from a node whose only edge leads to a node not seen before. As a rule it is this very object.
_CHAIN: Final[Step] = (1, [0], [])


class GraphShape(NamedTuple):
    """The form of a graph. Nodes are identified by their place in the walk.

    Attributes:
        roots: at how many nodes the walk begins.
        kinds: the types of the nodes.
        steps: how to go on from each of them; None for a leaf.
    """

    roots: int
    kinds: list[type]
    steps: list[Step | None]

    @classmethod
    def of(cls, beginnings: list[Node]) -> tuple[GraphShape, list[Node], list[list[int]]]:
        """Find the form of the graph below some nodes, its nodes, and for each the places of its children. O(edges)."""
        nodes = list(beginnings)
        seen: dict[Node | None, int] = {node: place for place, node in enumerate(nodes)} | {None: NOWHERE}
        form = cls(len(nodes), [], [])
        below: list[list[int]] = []
        for node in nodes:
            form.kinds.append(type(node))
            row = node.next_functions
            new, known = [], []
            for number, (child, _) in enumerate(row):
                if child in seen:
                    known.append((number, seen[child]))
                else:
                    seen[child] = len(nodes)
                    nodes.append(child)  # type: ignore[arg-type]
                    new.append(number)
            below.append([seen[child] for child, _ in row])
            step: Step = len(row), new, known
            is_leaf = type(node).__name__ == LEAF
            form.steps.append(None if is_leaf else _CHAIN if step == _CHAIN else step)
        return form, nodes, below

    def matched(self, beginnings: list[Node]) -> list[Node] | None:
        """Find the nodes of another graph in the order of the walk, if it has this form. O(edges).

        The walk begins with as many nodes as the form has, and every step adds as many as there; so all places that
        are known are there when they are asked for. Types are compared at the end, all at once.
        """
        if len(beginnings) != self.roots:
            return None
        nodes: list[Any] = list(beginnings)
        add = nodes.append
        try:
            for node, step in zip(nodes, self.steps, strict=False):  # nodes are added meanwhile
                if step is _CHAIN:  # most often
                    ((child, _),) = node.next_functions
                    add(child)
                elif step is not None:
                    row = node.next_functions
                    count, new, known = step
                    if len(row) != count:
                        return None
                    for number in new:
                        add(row[number][0])
                    for number, place in known:
                        if row[number][0] is not (None if place < 0 else nodes[place]):
                            return None
        except (AttributeError, ValueError):  # no node, or another number of edges
            return None
        return nodes if list(map(type, nodes)) == self.kinds and len(set(nodes)) == len(nodes) else None
