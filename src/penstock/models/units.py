"""Finds the units of a model: the modules that a split places, each whole, on one stage.

A unit is an element of an outermost ModuleList, ModuleDict or Sequential, or a maximal module that contains none of
these. What remains is glue and runs on every stage: the forwards of containers, and modules without state (rotary
tables, activations).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

LISTS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Units(NamedTuple):
    """The modules of a model, by how a split treats them; each dictionary is in registration order.

    Attributes:
        units: the units by name. A module that is registered under several names has the first one.
        glue: the outermost modules that run on every stage.
        containers: the modules whose forwards run on every stage; the root is ``""``.
        listed: the names of the units that are elements of lists.
    """

    units: dict[str, nn.Module]
    glue: dict[str, nn.Module]
    containers: dict[str, nn.Module]
    listed: frozenset[str]


def find_units(model: nn.Module, opened: Collection[str] = ()) -> Units:
    """Find the units of a model.

    Args:
        model: the model.
        opened: names of modules whose children are wanted as units of their own.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "layers": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})
    >>> found = find_units(model)
    >>> list(found.units), list(found.glue), list(found.containers)
    (['embed', 'layers.0'], ['layers.1'], ['', 'layers'])
    >>> list(find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).units)
    ['0', '1']
    """
    found = Units({}, {}, {}, frozenset())
    listed: set[str] = set()
    seen: set[nn.Module] = set()
    for kind, name, module, in_list in _walk(model, "", None, frozenset(opened)):
        if module not in seen:
            seen.add(module)
            getattr(found, kind)[name] = module
            if in_list and kind == "units":
                listed.add(name)
    return found._replace(listed=frozenset(listed))


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every name of every module."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _walk(
    module: nn.Module, name: str, parent: nn.Module | None, opened: frozenset[str]
) -> Iterator[tuple[str, str, nn.Module, bool]]:
    """Yield each unit, glue module and container: its kind, its name, itself, whether it is an element of a list."""
    in_list = isinstance(parent, LISTS)
    is_opened = any(one == name or one.startswith(f"{name}.") for one in opened) and next(module.children(), None)
    if parent is None or is_opened or not is_callable(module) or (not in_list and _contains_list(module)):
        yield "containers", name, module, in_list
        for child_name, child in module.named_children():
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, module, opened)
    elif has_state(module) or isinstance(parent, nn.Sequential):
        yield "units", name, module, in_list
    else:
        yield "glue", name, module, in_list


def is_callable(module: nn.Module) -> bool:
    """Return whether a module has a forward; a ModuleList has none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _contains_list(module: nn.Module) -> bool:
    return any(isinstance(part, LISTS) for part in module.modules())


def has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters, or buffers that are saved."""
    if next(module.parameters(), None) is not None:
        return True
    return any(name not in part._non_persistent_buffers_set for part in module.modules() for name in part._buffers)
