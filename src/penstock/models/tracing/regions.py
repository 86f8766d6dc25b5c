"""Handles no_grad and autocast regions, which an export holds as graphs inside the graph.

They are inlined, with a switch before and after, so that a cut may fall anywhere. Each part of the graph gets its own
switches later, from the modes in which its nodes run.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import fx
from torch.fx.node import has_side_effect, map_arg

if TYPE_CHECKING:
    from collections.abc import Iterator

_GRAD_REGION: Final = "wrap_with_set_grad_enabled"
_AUTOCAST_REGION: Final = "wrap_with_autocast"

_set_grad: Final = torch._C._set_grad_enabled
_enter_autocast: Final = torch.amp._enter_autocast  # type: ignore[attr-defined]
_exit_autocast: Final = torch.amp._exit_autocast  # type: ignore[attr-defined]
_DEVICES: Final = ("cpu", "cuda")
for _switch in (_set_grad, _enter_autocast, _exit_autocast):
    has_side_effect(_switch)


class Mode(NamedTuple):
    """A mode in which nodes run.

    Attributes:
        autocast: the arguments of an autocast region: device, dtype, whether it is on, whether it caches.
        gradients: for any other region, whether gradients are on in it.
    """

    autocast: tuple[Any, ...] | None
    gradients: bool = False

    def enter(self, graph: fx.Graph) -> fx.Node:
        """Append the switch to this mode; returns what ``leave`` needs."""
        if self.autocast is not None:
            return graph.call_function(_enter_autocast, self.autocast)
        before = graph.call_function(torch.is_grad_enabled)
        graph.call_function(_set_grad, (self.gradients,))
        return before

    def leave(self, graph: fx.Graph, entered: fx.Node) -> None:
        """Append the switch back."""
        graph.call_function(_set_grad if self.autocast is None else _exit_autocast, (entered,))


def inline_regions(module: fx.GraphModule) -> None:
    """Replace each region of a graph by its nodes, with switches around them."""
    for node in list(module.graph.nodes):
        mode = _mode_of(node)
        if mode is not None:
            _inline(module, node, mode)
    module.graph.eliminate_dead_code()  # getters of regions that are gone
    module.graph.lint()
    module.recompile()


def _mode_of(node: fx.Node) -> Mode | None:
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "")
    if name == _AUTOCAST_REGION:
        return Mode(tuple(node.args[:4]))
    return Mode(None, bool(node.args[0])) if name == _GRAD_REGION else None


def _inline(module: fx.GraphModule, node: fx.Node, mode: Mode) -> None:
    graph = module.graph
    body_at = 1 if mode.autocast is None else 4
    getter, operands = node.args[body_at], node.args[body_at + 1 :]
    assert isinstance(getter, fx.Node)
    body = module.get_submodule(str(getter.target))
    assert isinstance(body, fx.GraphModule)
    inline_regions(body)
    given = iter(operands)
    copies: dict[fx.Node, Any] = {}
    with graph.inserting_before(node):
        entered = mode.enter(graph)
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(given)
            elif inner.op == "output":
                results = map_arg(inner.args[0], copies.__getitem__)
            else:
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
                if inner.op == "get_attr":
                    copies[inner].target = _adopt(module, body, str(inner.target))
        mode.leave(graph, entered)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    if not getter.users:
        graph.erase_node(getter)


def _adopt(module: fx.GraphModule, body: fx.GraphModule, name: str) -> str:
    """Make what a region refers to, e.g. the branch of a condition, an attribute of the outer module."""
    value, free, number = getattr(body, name), name, 0
    while hasattr(module, free):
        number += 1
        free = f"{name}_{number}"
    setattr(module, free, value)
    return free


class Regions(NamedTuple):
    """The regions of a graph.

    Attributes:
        modes: for each node that is in some, those regions from the outside in, by number and mode.
        switches: the nodes that switch.
    """

    modes: dict[fx.Node, tuple[tuple[int, Mode], ...]]
    switches: set[fx.Node]


def find_regions(graph: fx.Graph) -> Regions:
    """Return in which modes the nodes of an inlined graph run."""
    modes: dict[fx.Node, tuple[tuple[int, Mode], ...]] = {}
    switches: set[fx.Node] = set()
    active: list[tuple[fx.Node, tuple[int, Mode]]] = []
    before: fx.Node | None = None
    for number, node in enumerate(graph.nodes):
        if node.op == "call_function" and node.target is torch.is_grad_enabled:
            before = node
        elif node.target is _enter_autocast:
            active.append((node, (number, Mode(tuple(node.args)))))
        elif node.target is _set_grad and isinstance(node.args[0], bool) and before is not None:
            active.append((before, (number, Mode(None, node.args[0]))))
        elif node.target in (_set_grad, _exit_autocast):
            active = [each for each in active if each[0] is not node.args[0]]
        else:
            modes[node] = tuple(region for _, region in active)
            continue
        switches.add(node)
    return Regions(modes, switches)


@contextmanager
def modes_kept() -> Iterator[None]:
    """Switch all modes back if an error leaves a region open."""
    gradients, caches, nesting = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _autocast_nesting()
    autocasts = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    try:
        yield
    except BaseException:
        _set_grad(gradients)
        for device, enabled, dtype in autocasts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caches)
        while _autocast_nesting() > nesting:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        raise


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
