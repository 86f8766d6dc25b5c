"""Merges the outputs of all microbatches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import MicrobatchError
from penstock.execution.microbatches.spec_tree import SpecTree, flatten, split_dim, splitter_for
from penstock.execution.microbatches.specs import Microbatches, Replicate, Spec
from penstock.execution.value_spec import describe_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def merge(values: Sequence[Any], spec: Spec = None, *, name: str = "output") -> Any:
    """Merge the values of all microbatches into one.

    Tensors are concatenated along the dimension of the spec, by default 0; single numbers (tensors without dimensions)
    are stacked. Anything else must be equal in all microbatches, unless its spec is ``Microbatches``: then the result
    has a ``Microbatches`` with all of them at that place.

    >>> merge([{"y": torch.ones(2), "loss": torch.tensor(0.5)}, {"y": torch.ones(1), "loss": torch.tensor(0.25)}])
    {'y': tensor([1., 1., 1.]), 'loss': tensor([0.5000, 0.2500])}
    """
    if not values:
        raise MicrobatchError(f"{name} has no microbatches, so there is nothing to merge", name=name)
    first = SpecTree.of(name, values[0], spec)
    if first.treespec.is_leaf():
        return _merged(first, 0, values)
    taken_apart = [flatten(value) for value in values]
    for index, (_, treespec) in enumerate(taken_apart):
        if treespec != first.treespec:
            raise MicrobatchError(
                f"microbatch {index} returned {name} with a different structure from microbatch 0, so they cannot be "
                f"merged: {treespec} and {first.treespec}",
                name=name,
            )
    columns = zip(*[leaves for leaves, _ in taken_apart], strict=True)
    merged = [_merged(first, index, column) for index, column in enumerate(columns)]
    return pytree.tree_unflatten(merged, first.treespec)


def _merged(tree: SpecTree, index: int, column: Sequence[Any]) -> Any:
    """Merge one leaf of all microbatches."""
    first, spec = column[0], tree.specs[index]
    if spec is Microbatches:
        return Microbatches(list(column))
    if spec is not Replicate:
        if (splitter := splitter_for(first)) is not None and splitter.merge is not None:
            return splitter.merge(column)
        if all(isinstance(value, torch.Tensor) for value in column):
            return _joined(tree, index, column)
    if all(_same(first, value) for value in column):
        return first
    name = tree.place(index)
    different = next(value for value in column if not _same(first, value))
    raise MicrobatchError(
        f"{name} differs between microbatches ({_short(first)} and {_short(different)}), so it cannot be merged; write "
        "Microbatches in its spec to keep them all",
        name=name,
    )


def _joined(tree: SpecTree, index: int, column: Sequence[torch.Tensor]) -> torch.Tensor:
    dim = split_dim(tree.specs[index])
    alike = len({(tensor.dtype, tensor.ndim) for tensor in column}) == 1
    try:
        if alike and column[0].ndim == 0:
            return torch.stack(tuple(column))
        if alike and -column[0].ndim <= dim < column[0].ndim:
            return torch.cat(tuple(column), dim) if len(column) > 1 else column[0]
    except RuntimeError:  # other sizes differ: say which
        pass
    name = tree.place(index)
    seen = list(dict.fromkeys(_short(tensor) for tensor in column))
    raise MicrobatchError(
        f"{name} is {' and '.join(seen[:2])} in the microbatches, which cannot be concatenated along dimension {dim}; "
        "write TensorChunkSpec(dim) in its spec for another dimension, or Microbatches to keep them all",
        name=name,
    )


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype is other.dtype and one.shape == other.shape
        return alike and bool(((one == other) | (one != one) & (other != other)).all())  # a NaN equals a NaN
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
