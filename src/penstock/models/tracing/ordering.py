"""Orders the nodes of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


def move_placeholders_to_front(graph: fx.Graph) -> None:
    """Move every placeholder before all other nodes; both keep their order."""
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    behind = False
    for node in list(graph.nodes):
        if node is first:
            behind = True
        elif behind and node.op == "placeholder" and first is not None:
            first.prepend(node)
