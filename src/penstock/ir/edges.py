"""Defines edges: which value goes from which stage to which later ones.

In a chain, every stage passes its output to the next. A skip connection, an encoder output that several decoder stages
read, or a router's logits that the loss needs are further edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import index
from typing import Final, NamedTuple, SupportsIndex

from penstock.errors import EdgeError

_EXAMPLE: Final = "write e.g. Edge(0, (1, 3))"


class Edge(NamedTuple):
    """A value that later stages need.

    A stage returns one value per edge that starts at it, as a tuple in the order of the edges; a single value is
    returned as it is.

    Attributes:
        source: the stage that returns the value.
        targets: the stages that take it, in ascending order.
        value: its name, for people.
        gradient: whether a gradient goes back over it.
    """

    source: int
    targets: tuple[int, ...]
    value: str = ""
    gradient: bool = True

    def __str__(self) -> str:
        targets = ",".join(map(str, self.targets))
        return f"{self.source}>{targets}{'' if self.gradient else '/F'}{self.value and f' ({self.value})'}"


class Link(NamedTuple):
    """What one stage sends another for each microbatch: the values of all edges between the two.

    Attributes:
        source: the stage that sends values, and receives their gradients.
        target: the stage that receives them.
        edges: the positions of these edges in the list of all edges.
        gradient: whether any of them has a gradient.
    """

    source: int
    target: int
    edges: tuple[int, ...]
    gradient: bool

    @property
    def is_chain(self) -> bool:
        """Whether it connects a stage to the next one."""
        return self.target == self.source + 1


def chain(stages: int) -> tuple[Edge, ...]:
    """Return the edges of a chain.

    >>> [str(edge) for edge in chain(3)]
    ['0>1', '1>2']
    """
    return tuple(Edge(stage, (stage + 1,)) for stage in range(stages - 1))


def is_chain(edges: Iterable[Edge], stages: int) -> bool:
    """Return whether the edges are those of a chain, whatever the names of their values."""
    return tuple(edge._replace(value="") for edge in edges) == chain(stages)


def links(edges: Iterable[Edge]) -> tuple[Link, ...]:
    """Return what stages send each other, by source and target.

    >>> [link[:3] for link in links([Edge(0, (1, 2)), Edge(0, (2,)), Edge(1, (2,))])]
    [(0, 1, (0,)), (0, 2, (0, 1)), (1, 2, (2,))]
    """
    between: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)
    for number, edge in enumerate(edges):
        for target in edge.targets:
            between[edge.source, target].append((number, edge.gradient))
    return tuple(
        Link(*ends, tuple(number for number, _ in carried), any(gradient for _, gradient in carried))
        for ends, carried in sorted(between.items())
    )


def checked_edges(edges: Iterable[Edge], stages: int) -> tuple[Edge, ...]:
    """Return the edges sorted by source, which all go forward between existing stages, or raise ``EdgeError``.

    >>> checked_edges([(1, [2]), (0, [3, 1])], stages=4)
    (Edge(source=0, targets=(1, 3), value='', gradient=True), Edge(source=1, targets=(2,), value='', gradient=True))
    """
    if not isinstance(edges, Iterable):
        raise EdgeError(f"edges must be a list of Edge, got {edges!r}; {_EXAMPLE}")
    return tuple(sorted((_checked(edge, stages) for edge in edges), key=lambda edge: edge.source))


def _checked(given: object, stages: int) -> Edge:
    try:
        edge = Edge(*given)  # type: ignore[misc]  # whether it has these parts is what is tried
        source, targets = index(edge.source), tuple(sorted({_stage(target) for target in edge.targets}))
    except TypeError:
        raise EdgeError(f"an edge needs a source stage and its target stages, got {given!r}; {_EXAMPLE}") from None
    if not targets:
        raise EdgeError(f"the edge from stage {source} has no target; {_EXAMPLE}")
    if not 0 <= source < stages or targets[-1] >= stages:
        raise EdgeError(f"edge {edge._replace(targets=targets)} does not fit stages 0 to {stages - 1}")
    if targets[0] <= source:
        raise EdgeError(
            f"an edge from stage {source} to stage {targets[0]} goes backwards; values go from a stage to later ones"
        )
    return Edge(source, targets, str(edge.value), bool(edge.gradient))


def _stage(target: SupportsIndex) -> int:
    return index(target)
