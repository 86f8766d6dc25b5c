"""Finds for each node of a trace where it belongs: in which calls of modules, and in which modes."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.models.tracing.regions import Mode, find_regions

if TYPE_CHECKING:
    from torch import fx


class Call(NamedTuple):
    """A call of a module.

    Attributes:
        path: the name of the module in the model.
        number: which call of it this is.
    """

    path: str
    number: str


#: From the outside in.
Scope: TypeAlias = tuple[Call | Mode, ...]


class Scopes(NamedTuple):
    """The scopes of a graph.

    Attributes:
        of: the scope of each node.
        switches: nodes that only switch modes, which the scopes hold.
    """

    of: dict[fx.Node, Scope]
    switches: set[fx.Node]


def find_scopes(graph: fx.Graph) -> Scopes:
    """Return where the nodes of a trace with inlined regions belong."""
    calls = _calls(graph)
    modes, switches = find_regions(graph)
    depth: dict[int, int] = {}  # how many calls around a region enclose all of it
    example: dict[int, fx.Node] = {}
    for node, regions in modes.items():
        if node not in calls:
            continue
        for number, _ in regions:
            first = example.setdefault(number, node)
            depth[number] = min(depth.get(number, len(calls[first])), _common(calls[first], calls[node]))
    scopes: dict[fx.Node, Scope] = {}
    for node, around in calls.items():
        scope: list[Call | Mode] = []
        done = 0
        for number, mode in modes.get(node, ()):
            scope += [*around[done : depth[number]], mode]
            done = max(done, depth[number])
        scopes[node] = (*scope, *around[done:])
    return Scopes(scopes, switches)


def _calls(graph: fx.Graph) -> dict[fx.Node, tuple[Call, ...]]:
    """The calls that each operation is in; one without a record, which a policy has inserted, is beside the last."""
    found: dict[fx.Node, tuple[Call, ...]] = {}
    last: tuple[Call, ...] = ()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        stack = node.meta.get("nn_module_stack")
        if stack:
            # A key ends in @1 for the second call of a module, and so on. The model itself has no name.
            last = tuple(Call(entry[0], key.rpartition("@")[2] if "@" in key else "0") for key, entry in stack.items())
            last = tuple(call for call in last if call.path)
        found[node] = last
    return found


def _common(one: tuple[Call, ...], other: tuple[Call, ...]) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])
