"""Specs for arguments and splitters for types: how a user wants values split into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True, repr=False)
class TensorChunkSpec:
    """Split, or concatenate, along this dimension.

    >>> TensorChunkSpec.from_tuple((0, 1))
    (TensorChunkSpec(0), TensorChunkSpec(1))
    """

    split_dim: int

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> Any:
        """Make the specs of arguments from their dimensions."""
        return pytree.tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> Any:
        """Make the specs of keyword arguments from their dimensions."""
        return pytree.tree_map(TensorChunkSpec, chunk_dims)


class Replicate:
    """In a spec: pass the whole value to every microbatch. In a merge: the value is the same in all; take one.

    >>> import torch
    >>> from penstock.execution.microbatches.split import split
    >>> split({"x": torch.arange(4), "table": torch.zeros(7)}, {"table": Replicate}, 2)[1]["table"].shape
    torch.Size([7])
    """


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A value that is already split: one item per microbatch. It may appear anywhere in arguments or target.

    >>> import torch
    >>> from penstock.execution.microbatches.merge import merge
    >>> from penstock.execution.microbatches.split import split
    >>> split(("text", Microbatches([1, 2])), None, 2)
    [('text', 1), ('text', 2)]

    In the spec of a merge, the class itself keeps the value of every microbatch:

    >>> merge([(torch.ones(1), 0.5), (torch.ones(1), 0.7)], (None, Microbatches))
    (tensor([1., 1.]), Microbatches(values=[0.5, 0.7]))
    """

    values: Sequence[Any]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


Spec: TypeAlias = Any
"""None, TensorChunkSpec, Replicate, or a container of specs."""


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits, merges and counts values of a type."""

    split: Callable[[Any, int], Sequence[Any]]
    merge: Callable[[Sequence[Any]], Any] | None
    size: Callable[[Any], int | None] | None


SPLITTERS: dict[type, Splitter] = {}
_RESOLVED: dict[type, Splitter | None] = {}


def register_splitter(
    kind: type,
    split: Callable[[Any, int], Sequence[Any]],
    merge: Callable[[Sequence[Any]], Any] | None = None,
    *,
    size: Callable[[Any], int | None] | None = None,
) -> None:
    """Register how values of a type, and of its subclasses, are split.

    Args:
        kind: the type.
        split: takes a value and a number of microbatches; returns that many values.
        merge: combines such values into one; needed for types that a last stage returns.
        size: returns the number of samples in a value, to compare with that of tensors; None for one without.
    """
    SPLITTERS[kind] = Splitter(split, merge, size)
    _RESOLVED.clear()


def splitter_of(kind: type) -> Splitter | None:
    """Find the registered splitter of a type, if any."""
    if kind not in _RESOLVED:
        _RESOLVED[kind] = next((SPLITTERS[base] for base in kind.__mro__ if base in SPLITTERS), None)
    return _RESOLVED[kind]


def unregister_splitter(kind: type) -> None:
    """Forget how values of a type are split."""
    SPLITTERS.pop(kind, None)
    _RESOLVED.clear()
