"""Finds numbers that modules keep as attributes, and the code of a stage that reads them."""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn


def numbers_of(model: nn.Module) -> dict[str, Any]:
    """Return the numbers that are attributes of a model's modules, by name.

    >>> from torch import nn
    >>> numbers_of(nn.Sequential(nn.Dropout(0.5)))
    {'0.p': 0.5, '0.inplace': False}
    """
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float)) and key not in ("training", "call_super_init")
    }


def changed_numbers(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers that are not what they were."""
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


def outdated(changed: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the numbers that a model has changed and a stage has not, as they are there and in the model."""
    pairs = {name: (found.get(name), expected) for name, expected in changed.items()}
    return {
        name: (one, other)
        for name, (one, other) in pairs.items()
        if one is None or not isclose(one, other, rel_tol=1e-5)
    }


def note_reads(model: nn.Module, names: Iterable[str], note: Callable[[str], None]) -> None:
    """Have reads of attributes of a model's modules noted from now on."""
    modules = dict(model.named_modules())
    for name in names:
        owner, _, key = name.rpartition(".")
        _watch(modules[owner], key, lambda name=name: note(name))  # type: ignore[misc]


def _watch(module: nn.Module, name: str, note: Callable[[], None]) -> None:
    """Make an attribute of one module a property."""
    kind = type(module)

    def read(self: nn.Module) -> Any:
        note()
        return vars(self)[name] if name in vars(self) else getattr(kind, name)

    def write(self: nn.Module, value: Any) -> None:
        vars(self)[name] = value

    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, name: property(read, write)}
    module.__class__ = type(kind.__name__, (kind,), body)
