"""Flattens a value into leaves, with a spec for each of them."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import MicrobatchError
from penstock.execution.microbatches.specs import Microbatches, Replicate, Spec, Splitter, TensorChunkSpec, splitter_of


@dataclass(frozen=True, slots=True)
class SpecTree:
    """A flattened value.

    Attributes:
        name: what users call it.
        value: the value.
        leaves: what is in it.
        treespec: its structure.
        specs: a spec for each leaf.
    """

    name: str
    value: Any
    leaves: list[Any]
    treespec: Any
    specs: list[Spec]

    @classmethod
    def of(cls, name: str, value: Any, spec: Spec) -> SpecTree:
        """Flatten a value."""
        leaves, treespec = flatten(value)
        return cls(name, value, leaves, treespec, leaf_specs(spec, value, len(leaves), name))

    def place(self, index: int) -> str:
        """Name a leaf as a user would write it."""
        try:
            found, _ = pytree.tree_flatten_with_path(self.value, is_leaf=is_leaf)
        except ValueError:  # a type that was registered without names for its children
            return f"{self.name} (leaf {index})"
        return self.name + pytree.keystr(found[index][0])


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Flatten a value into its leaves and its structure.

    Torch's function leaves reference cycles that only the garbage collector can free; a step should leave none, so it
    is asked only where something is nested.
    """
    if _is_single(value):
        return [value], _flat_structure(None)
    if type(value) in (tuple, dict):
        children = list(value.values() if type(value) is dict else value)
        if all(map(_is_single, children)):
            return children, _flat_structure(tuple(value) if type(value) is dict else len(value))
    return pytree.tree_flatten(value, is_leaf=is_leaf)


def _is_single(value: Any) -> bool:
    """Whether a value is a leaf; quickly for what most of them are."""
    return type(value) is torch.Tensor or pytree.tree_is_leaf(value, is_leaf=is_leaf)


@lru_cache(maxsize=256)
def _flat_structure(kind: tuple[Any, ...] | int | None) -> Any:
    """Build the structure of a leaf (None), of a tuple of leaves (their number) or of a dict (its keys)."""
    if kind is None:
        return pytree.tree_structure(0)
    return pytree.tree_structure(dict.fromkeys(kind, 0) if isinstance(kind, tuple) else (0,) * kind)


def is_leaf(value: Any) -> bool:
    """Whether a value is a leaf here, although torch may treat it as a container."""
    return isinstance(value, Microbatches) or splitter_for(value) is not None


def splitter_for(value: Any) -> Splitter | None:
    """Find the splitter that was registered for a value's type, if any."""
    return splitter_of(type(value))


def leaf_specs(spec: Spec, value: Any, count: int, name: str) -> list[Spec]:
    """Find a spec for each of the ``count`` leaves of a value."""
    if spec is None or isinstance(spec, TensorChunkSpec):
        return [spec] * count
    if spec is Replicate or isinstance(spec, Replicate):
        return [Replicate] * count
    if spec is Microbatches:
        return [Microbatches] * count
    if isinstance(value, Microbatches):
        return [None]
    if _children(spec) is None:
        raise MicrobatchError(
            f"the spec of {name} is {spec!r}; write TensorChunkSpec(dim), Replicate, or containers of them", name=name
        )
    if isinstance(spec, dict) and isinstance(value, dict):
        pairs = _by_key(spec, value, name)
    elif is_dataclass(spec) and type(spec) is type(value):
        pairs = _by_field(spec, value, name)
    else:
        pairs = _by_place(spec, value, name)
    return [leaf for child_spec, child, place in pairs for leaf in leaf_specs(child_spec, child, _count(child), place)]


def _by_key(spec: dict[Any, Any], value: dict[Any, Any], name: str) -> list[tuple[Spec, Any, str]]:
    unknown = [key for key in spec if key not in value]
    if unknown:
        raise MicrobatchError(f"the spec of {name} has {unknown[0]!r}, which is not in {name}", name=name)
    return [(spec.get(key), child, f"{name}[{key!r}]") for key, child in value.items()]


def _by_field(spec: Any, value: Any, name: str) -> list[tuple[Spec, Any, str]]:
    # By name: torch leaves out fields that are None, and the spec may have other ones.
    try:
        inner, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    except ValueError:  # registered without names for its children
        return _by_place(spec, value, name)
    names = [pytree.keystr(path) for path, _ in inner]
    return [(getattr(spec, key[1:]), child, name + key) for key, (_, child) in zip(names, inner, strict=True)]


def _by_place(spec: Any, value: Any, name: str) -> list[tuple[Spec, Any, str]]:
    specs, children = _children(spec) or [], _children(value)
    if children is None or len(children) != len(specs):
        held = "is not a container" if children is None else f"holds {len(children)}"
        raise MicrobatchError(f"the spec of {name} is for {len(specs)} values, but {name} {held}", name=name)
    return [(spec, child, f"{name}[{index}]") for index, (spec, child) in enumerate(zip(specs, children, strict=True))]


def _children(value: Any) -> list[Any] | None:
    """Get the children of a container; None for a leaf."""
    if is_leaf(value):
        return None
    children, treespec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    return None if treespec.is_leaf() else children


def _count(value: Any) -> int:
    return len(pytree.tree_leaves(value, is_leaf=is_leaf))


def split_dim(spec: Spec) -> int:
    """Get the dimension that a spec splits."""
    return spec.split_dim if isinstance(spec, TensorChunkSpec) else 0
