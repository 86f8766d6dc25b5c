"""Finds what a model's code keeps outside the model: in global variables, class attributes and enclosing functions.

Stages in one process share that state, stages on different ranks do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

#: The contents of a place by key.
Contents = dict[Hashable, Any]

#: Libraries whose own variables are not watched: code of a model does not keep its values there.
_LIBRARIES: Final = frozenset({"torch", "numpy", "transformers", "penstock"}) | sys.stdlib_module_names
#: How deep containers and objects in a variable are looked into.
_DEPTH: Final = 3
_CODE: Final = (type, ModuleType, FunctionType, MethodType, staticmethod, classmethod, property, torch.Tensor)


class Place(NamedTuple):
    """Something that holds values.

    Attributes:
        name: what it is called in messages.
        owner: the object.
        read: returns what it holds.
        write: makes it hold that.
        is_indexed: whether its entries are written with brackets.
    """

    name: str
    owner: Any
    read: Callable[[], Contents]
    write: Callable[[Contents], None]
    is_indexed: bool = False

    def describe(self, key: Hashable) -> str:
        """Describe an entry."""
        if self.is_indexed:
            return f"{self.name}[{key!r}]"
        return ".".join(filter(None, (self.name, str(key))))


class OutsideState:
    """The state outside a model that code of its modules can reach by name."""

    def __init__(self, model: nn.Module) -> None:
        self._roots = _outside(model)

    def take(self) -> list[tuple[Place, Contents]]:
        """Return what is there now."""
        return [(place, place.read()) for place in expand(self._roots)]

    def put(self, state: Iterable[tuple[Place, Contents]]) -> None:
        """Put back what was there."""
        for place, contents in state:
            if _differ(place.read(), contents):
                place.write(contents)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put back at the end what was there before."""
        before = self.take()
        try:
            yield
        finally:
            self.put(before)


def places_in(model: nn.Module) -> list[Place]:
    """Return the places in a model, and those outside it that its code can reach."""
    return [*_inside(model), *_outside(model)]


def expand(places: Iterable[Place]) -> list[Place]:
    """Return places with the containers and objects in them, each once."""
    found: dict[int, Place] = {}
    level = list(places)
    for _ in range(_DEPTH):
        following: list[Place] = []
        for place in level:
            if id(place.owner) in found:
                continue
            found[id(place.owner)] = place
            for key, value in place.read().items():
                following += _places_of(value, place.describe(key))
        level = following
    return list(found.values())


def changes(before: Iterable[tuple[Place, Contents]]) -> list[str]:
    """Describe the entries that are not what they were."""
    return [
        place.describe(key)
        for place, contents in before
        for now in [place.read()]
        for key in now
        if key not in contents or not _is_same(now[key], contents[key])
    ]


def _differ(one: Contents, other: Contents) -> bool:
    return one.keys() != other.keys() or any(not _is_same(one[key], other[key]) for key in one)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str, complex)) and one == other)


def _outside(model: nn.Module) -> list[Place]:
    """Find the variables that methods of a model's modules, and of the objects that they hold, can reach."""
    found: dict[int, Place] = {}
    for owner in [place.owner for place in expand(_inside(model))]:
        for kind in type(owner).__mro__:
            if id(kind) not in found and _may_keep_values(kind):
                found[id(kind)] = _class_attributes(kind)
                found |= {id(place.owner): place for place in _reached_by_methods(kind)}
    return list(found.values())


def _inside(model: nn.Module) -> list[Place]:
    return [_attributes(module, name) for name, module in model.named_modules()]


def _may_keep_values(kind: type) -> bool:
    """Return whether a class belongs to a model: one of a user, or of transformers' models."""
    return not _is_library(kind.__module__) or kind.__module__.startswith("transformers.models.")


def _reached_by_methods(kind: type) -> Iterator[Place]:
    for function in list(vars(kind).values()):
        plain = getattr(function, "__func__", function)
        if not isinstance(plain, FunctionType):
            continue
        yield _variables(plain.__globals__)
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            yield _cell(cell, f"{name} of {plain.__qualname__}")
        for value in list(plain.__globals__.values()):
            if isinstance(value, ModuleType) and not _is_installed(value):
                yield _variables(vars(value))


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_installed(module: ModuleType) -> bool:
    """Return whether a module is not the user's own: others may change theirs at any time, in threads."""
    places = Path(getattr(module, "__file__", None) or "site-packages").parts
    return _is_library(module.__name__) or not {"site-packages", "dist-packages"}.isdisjoint(places)


def _is_watched(key: Any, value: Any) -> bool:
    """Return whether an entry may be a value that code keeps, not code itself."""
    is_private = isinstance(key, str) and key.startswith("__")
    return not is_private and (not isinstance(value, _CODE) or isinstance(value, torch.Tensor))


def _entries(name: str, mapping: dict[Any, Any], owner: Any, *, is_indexed: bool = False) -> Place:
    def read() -> Contents:
        return {key: value for key, value in mapping.items() if _is_watched(key, value)}

    def write(contents: Contents) -> None:
        for key in read():
            if key not in contents:
                del mapping[key]
        mapping.update(contents)

    return Place(name, owner, read, write, is_indexed)


def _variables(variables: dict[str, Any]) -> Place:
    return _entries(str(variables.get("__name__", "")), variables, variables)


def _attributes(owner: Any, name: str) -> Place:
    return _entries(name, vars(owner), owner)


def _class_attributes(kind: type) -> Place:
    def read() -> Contents:
        return {key: value for key, value in vars(kind).items() if _is_watched(key, value)}

    def write(contents: Contents) -> None:
        for key in read():
            if key not in contents:
                delattr(kind, str(key))
        for key, value in contents.items():
            if key not in vars(kind) or not _is_same(vars(kind)[str(key)], value):
                setattr(kind, str(key), value)

    return Place(kind.__qualname__, kind, read, write)


def _cell(cell: CellType, name: str) -> Place:
    def read() -> Contents:
        try:
            return {"": cell.cell_contents} if _is_watched("", cell.cell_contents) else {}
        except ValueError:  # it is empty
            return {}

    def write(contents: Contents) -> None:
        if contents:
            cell.cell_contents = contents[""]

    return Place(name, cell, read, write)


def _places_of(value: Any, name: str) -> list[Place]:
    """Return the place that a value is, if it is a container or a plain object."""
    if isinstance(value, dict):
        return [_entries(name, value, value, is_indexed=True)]
    if isinstance(value, list):
        return [Place(name, value, lambda: dict(enumerate(value)), lambda new: _fill(value, new), is_indexed=True)]
    is_code = isinstance(value, (torch.nn.Module, *_CODE)) or _is_library(type(value).__module__)
    return [] if is_code or not hasattr(value, "__dict__") else [_attributes(value, name)]


def _fill(values: list[Any], contents: Contents) -> None:
    values[:] = contents.values()
