"""The structure of a value that is sent between stages: where its tensors are, and everything else in it.

A value is any nesting of tuples, lists and dicts with text for keys, around tensors, None, bool, int, float and str.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from penstock.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEEPEST = 32
"""More levels than this are a mistake: most likely a list that holds itself."""

_PLAIN = frozenset({type(None), bool, int, float, str})
SMALLEST_INTEGER, LARGEST_INTEGER = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """The place of a tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A leaf that is not a tensor. ``1``, ``1.0`` and ``True`` are three different ones; a NaN equals itself."""

    value: bool | int | float | str | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


@dataclass(frozen=True, slots=True)
class Branch:
    """A tuple, a list or a dict, with what is in it in order."""

    kind: type
    keys: tuple[int | str, ...]
    children: tuple[Structure, ...]


Structure: TypeAlias = TensorLeaf | Constant | Branch
Path: TypeAlias = tuple[int | str, ...]

TENSOR = TensorLeaf()


@lru_cache(maxsize=64)
def flat_tuple(count: int) -> Branch:
    """Make a tuple of tensors and nothing else: always the same object, so that it is known at once."""
    return Branch(tuple, tuple(range(count)), (TENSOR,) * count)


def branch(kind: type, keys: Sequence[int | str], children: Sequence[Structure]) -> Branch:
    """Make a branch; the one of ``flat_tuple`` where that is it."""
    if kind is tuple and all(child is TENSOR for child in children):
        return flat_tuple(len(children))
    return Branch(kind, tuple(keys), tuple(children))


def structure_of(value: Any, leaves: list[torch.Tensor]) -> Structure:
    """Find the structure of a value; its tensors are appended to ``leaves``, in order.

    >>> leaves = []
    >>> structure_of(torch.ones(2), leaves), len(leaves)
    (TensorLeaf(), 1)
    """
    return _structure(value, leaves, ())


def collect_tensors(structure: Structure, value: Any, leaves: list[torch.Tensor]) -> bool:
    """Whether a value has this structure; its tensors are appended to ``leaves``. Builds nothing, so it is quick."""
    if isinstance(structure, TensorLeaf):
        leaves.append(value)
        return isinstance(value, torch.Tensor)
    if isinstance(structure, Constant):
        return structure.value is value or structure == Constant(value)
    if not isinstance(value, (tuple, list, dict)) or type(value) is not structure.kind:
        return False
    if len(value) != len(structure.children):
        return False
    if isinstance(value, dict):
        if tuple(value) != structure.keys:
            return False
        value = value.values()
    # A loop: a generator would cost as much as all the rest.
    for child, inner in zip(structure.children, value, strict=True):  # noqa: SIM110
        if not collect_tensors(child, inner, leaves):
            return False
    return True


def rebuild(structure: Structure, leaves: Iterator[torch.Tensor]) -> Any:
    """Build the value of this structure, with these tensors in its places."""
    if isinstance(structure, TensorLeaf):
        return next(leaves)
    if isinstance(structure, Constant):
        return structure.value
    inner = [rebuild(child, leaves) for child in structure.children]
    if structure.kind is dict:
        return dict(zip(structure.keys, inner, strict=True))
    return inner if structure.kind is list else tuple(inner)


def paths(structure: Structure, path: Path = ()) -> Iterator[tuple[Path, TensorLeaf | Constant]]:
    """Yield every leaf with the keys that lead to it, in order."""
    if not isinstance(structure, Branch):
        yield path, structure
        return
    for key, child in zip(structure.keys, structure.children, strict=True):
        yield from paths(child, (*path, key))


def format_path(name: str, path: Path) -> str:
    """Format a path as a user would write it.

    >>> format_path("output", (1, "hidden"))
    "output[1]['hidden']"
    """
    return name + "".join(f"[{key!r}]" for key in path)


def _structure(value: Any, leaves: list[torch.Tensor], path: Path) -> Structure:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return TENSOR
    kind = type(value)
    if kind is tuple or kind is list or kind is dict:
        return _branch(value, kind, leaves, path)
    if value is None or kind is bool or kind is float or kind is str:
        return Constant(value)
    if kind is int and SMALLEST_INTEGER <= value <= LARGEST_INTEGER:
        return Constant(value)
    raise MetadataError(_refusal(value, path))


def _branch(value: Any, kind: type, leaves: list[torch.Tensor], path: Path) -> Branch:
    if len(path) >= DEEPEST:
        raise MetadataError(
            f"{format_path('output', path[:3])}... is nested deeper than {DEEPEST} levels; does it contain itself?"
        )
    items = value.items() if kind is dict else enumerate(value)
    keys: list[int | str] = []
    children: list[Structure] = []
    for key, child in items:
        if kind is dict and type(key) is not str:
            raise MetadataError(
                f"{format_path('output', path)} has the key {key!r}; between stages, keys must be strings"
            )
        keys.append(key)
        children.append(_structure(child, leaves, (*path, key)))
    return branch(kind, keys, children)


def _refusal(value: Any, path: Path) -> str:
    name = format_path("output", path)
    if type(value) is int:
        return f"{name} is an integer of more than 64 bits, which cannot be sent between stages; pass it as a string"
    return (
        f"{name} is a {type(value).__qualname__}, which cannot be sent between stages; pass tensors, numbers, strings "
        "or None in tuples, lists and dicts"
    )


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to each tensor of a value.

    Torch's function leaves reference cycles that only the garbage collector can free; a step should leave none, so it
    is asked only for containers that are not Python's own.

    >>> map_tensors(torch.neg, (torch.ones(2), {"scale": 0.5, "more": [torch.zeros(1)]}))
    (tensor([-1., -1.]), {'scale': 0.5, 'more': [tensor([-0.])]})
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind in (tuple, list):
        return kind([map_tensors(function, one) for one in value])
    if kind is dict:
        return {name: map_tensors(function, one) for name, one in value.items()}
    return value if kind in _PLAIN else pytree.tree_map_only(torch.Tensor, function, value)


def tensors_in(values: tuple[Any, ...] | dict[str, Any]) -> list[torch.Tensor]:
    """Find the tensors in the arguments of a call; fast where they are not nested."""
    given = list(values.values() if isinstance(values, dict) else values)
    for value in given:
        if not isinstance(value, torch.Tensor):
            break
    else:
        return given
    found: list[torch.Tensor] = []
    map_tensors(found.append, values)
    return found
