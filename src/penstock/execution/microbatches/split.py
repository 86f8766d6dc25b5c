"""Splits a batch into microbatches.

A spec says how: ``TensorChunkSpec(dim)`` or ``Replicate`` for a leaf, or for everything below that place; in containers
like those of the value. By default, a tensor is split along dimension 0 and anything else is passed whole to
every microbatch. Sizes are those of ``torch.tensor_split``: the first microbatches get one extra sample if needed.

A tensor is never replicated unless the spec says so.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import MicrobatchError
from penstock.execution.microbatches.spec_tree import SpecTree, is_leaf, split_dim, splitter_for
from penstock.execution.microbatches.specs import Microbatches, Replicate, Spec, Splitter

if TYPE_CHECKING:
    from collections.abc import Sequence


def split(value: Any, spec: Spec, microbatches: int, *, name: str = "value") -> list[Any]:
    """Split a value into one per microbatch.

    >>> split(torch.arange(5), None, 2)
    [tensor([0, 1, 2]), tensor([3, 4])]
    >>> split(torch.tensor(1.0), None, 2, name="args[1]")
    Traceback (most recent call last):
    penstock.errors.MicrobatchError: args[1] is a single number and cannot be split into 2 microbatches; \
write Replicate in its spec if every microbatch needs it
    """
    return _split_together([SpecTree.of(name, value, spec)], microbatches)[0]


def split_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target: Any,
    microbatches: int,
    args_spec: Spec = None,
    kwargs_spec: Spec = None,
    target_spec: Spec = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[Any]]:
    """Split arguments, keyword arguments and target, which must all have the same number of samples.

    >>> split_call((torch.arange(4),), {"scale": 2}, None, 2)
    ([(tensor([0, 1]),), (tensor([2, 3]),)], [{'scale': 2}, {'scale': 2}], [None, None])
    """
    given = args or kwargs or args_spec or kwargs_spec or target_spec
    if microbatches > 0 and not given and target is None:
        return [()] * microbatches, [{} for _ in range(microbatches)], [None] * microbatches
    trees = [
        SpecTree.of("args", args, args_spec),
        SpecTree.of("kwargs", kwargs or {}, kwargs_spec),
        SpecTree.of("target", target, target_spec),
    ]
    arguments, keywords, targets = _split_together(trees, microbatches)
    return arguments, keywords, targets


def feasible_count(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target: Any,
    microbatches: int,
    args_spec: Spec = None,
    kwargs_spec: Spec = None,
    target_spec: Spec = None,
) -> int:
    """Count the microbatches that a batch can be split into: the number asked for, or its samples if fewer.

    >>> feasible_count((torch.arange(3),), {"scale": 2}, None, 4)
    3
    """
    trees = [
        SpecTree.of("args", args, args_spec),
        SpecTree.of("kwargs", kwargs or {}, kwargs_spec),
        SpecTree.of("target", target, target_spec),
    ]
    counts = [
        len(leaf) if isinstance(leaf, Microbatches) else _size(tree, index, microbatches)
        for tree in trees
        for index, leaf in enumerate(tree.leaves)
    ]
    return max(1, min([microbatches, *[count for count in counts if count is not None]]))


def sizes(total: int, microbatches: int) -> list[int]:
    """Compute how many of ``total`` samples go into each microbatch.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    """
    least, more = divmod(total, microbatches)
    return [least + 1] * more + [least] * (microbatches - more)


def samples(value: Any, parts: Sequence[Any], spec: Spec = None) -> list[int] | None:
    """Count the samples in each microbatch of a value, by the first tensor that is split; None without one.

    >>> value = (torch.ones(5, 2), "text")
    >>> samples(value, split(value, None, 2))
    [3, 2]

    Args:
        value: the whole.
        parts: what it was split into; used if it was passed in parts.
        spec: how it was split.
    """
    if not is_presplit(value):
        total = _samples(SpecTree.of("value", value, spec))
        return None if total is None else sizes(total, len(parts))
    found = [_samples(SpecTree.of("microbatch", part, spec)) for part in parts]
    known = [count for count in found if count is not None]
    return known if len(known) == len(found) else None


def is_presplit(value: Any) -> bool:
    """Whether a value has parts that were passed as ``Microbatches``."""
    return any(isinstance(leaf, Microbatches) for leaf in pytree.tree_leaves(value, is_leaf=is_leaf))


def _split_together(trees: list[SpecTree], microbatches: int) -> list[list[Any]]:
    if microbatches < 1:
        raise MicrobatchError(f"the number of microbatches must be at least 1, got {microbatches}")
    _agree(trees, microbatches)
    return [_split_tree(tree, microbatches) for tree in trees]


def _split_tree(tree: SpecTree, microbatches: int) -> list[Any]:
    columns = [_pieces(tree, index, microbatches) for index in range(len(tree.leaves))]
    if tree.treespec.is_leaf():
        return list(columns[0])
    rows = zip(*columns, strict=True) if columns else [()] * microbatches
    value = tree.value
    # Arguments are usually flat: then torch's slow unflatten is not needed.
    if type(value) in (tuple, dict) and len(value) == len(columns) == tree.treespec.num_nodes - 1:
        return list(rows) if type(value) is tuple else [dict(zip(value, row, strict=True)) for row in rows]
    return [pytree.tree_unflatten(row, tree.treespec) for row in rows]


def _pieces(tree: SpecTree, index: int, microbatches: int) -> Sequence[Any]:
    """Split a leaf."""
    value, spec = tree.leaves[index], tree.specs[index]
    if isinstance(value, Microbatches):
        return _presplit(tree, index, value, microbatches)
    if spec is Replicate:
        return [value] * microbatches
    if (splitter := splitter_for(value)) is not None:
        return _custom(tree, index, splitter, microbatches)
    if not isinstance(value, torch.Tensor):
        return _broadcast(tree, index, microbatches)
    return slice_tensor(value, split_dim(spec), microbatches)


def split_leaf(tensor: torch.Tensor, spec: Spec, microbatches: int) -> Sequence[torch.Tensor]:
    """Split a tensor that is known to fit its spec."""
    return [tensor] * microbatches if spec is Replicate else slice_tensor(tensor, split_dim(spec), microbatches)


def slice_tensor(tensor: torch.Tensor, dim: int, microbatches: int) -> Sequence[torch.Tensor]:
    """Split a tensor into parts that share its memory, and that a module may modify in place."""
    lengths = sizes(tensor.shape[dim], microbatches)
    if not tensor.requires_grad:
        # Not views to autograd: otherwise modifying one in place would add to the history of all the others.
        return torch.unsafe_split_with_sizes(tensor, lengths, dim)
    # One by one: autograd does not allow modifying a view that was made together with others.
    starts = accumulate(lengths[:-1], initial=0)
    return [tensor.narrow(dim, start, length) for start, length in zip(starts, lengths, strict=True)]


def _presplit(tree: SpecTree, index: int, value: Microbatches, microbatches: int) -> Sequence[Any]:
    if len(value) == microbatches:
        return value.values
    name = tree.place(index)
    raise MicrobatchError(
        f"{name} is given as {len(value)} microbatches, but the schedule has {microbatches}", name=name
    )


def _custom(tree: SpecTree, index: int, splitter: Splitter, microbatches: int) -> Sequence[Any]:
    kind = type(tree.leaves[index]).__qualname__
    if (dim := split_dim(tree.specs[index])) != 0:
        name = tree.place(index)
        raise MicrobatchError(
            f"{name} is a {kind}, which has a registered splitter; TensorChunkSpec({dim}) does not apply to it",
            name=name,
        )
    pieces = splitter.split(tree.leaves[index], microbatches)
    if len(pieces) == microbatches:
        return pieces
    name = tree.place(index)
    raise MicrobatchError(
        f"the splitter of {kind} returned {len(pieces)} microbatches of {name}, not {microbatches}", name=name
    )


def _broadcast(tree: SpecTree, index: int, microbatches: int) -> Sequence[Any]:
    value = tree.leaves[index]
    if not holds_tensors(value):
        return [value] * microbatches
    name, kind = tree.place(index), type(value).__qualname__
    raise MicrobatchError(
        f"{name} is a {kind} that contains tensors, and it has no splitter; call register_splitter({kind}, ...) "
        "or write Replicate in its spec if every microbatch needs all of it",
        name=name,
    )


def holds_tensors(value: Any) -> bool:
    """Whether an object of a user's class contains tensors that may be part of the batch."""
    if type(value).__module__ == "builtins" or callable(value):
        return False
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", ()))
    inner = [getattr(value, name, None) for name in names]
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(inner))


def _agree(trees: list[SpecTree], microbatches: int) -> None:
    """Raise unless every leaf that is split has the same number of samples, and enough of them."""
    counted = [
        (tree, index, size)
        for tree in trees
        for index in range(len(tree.leaves))
        if (size := _size(tree, index, microbatches)) is not None
    ]
    if not counted:
        return
    tree, index, size = counted[0]
    for other in counted:
        if other[2] != size:
            raise _disagreement(counted[0], other)
    if size < microbatches:
        name = tree.place(index)
        raise MicrobatchError(
            f"{_describe(tree, index)} cannot be split into {microbatches} microbatches: it has {size} along "
            f"dimension {split_dim(tree.specs[index])}; pass at least {microbatches} samples (drop a smaller last "
            "batch) or use a schedule with fewer microbatches; if samples are along another dimension, write "
            "TensorChunkSpec(dim) in its spec",
            name=name,
        )


def _size(tree: SpecTree, index: int, microbatches: int) -> int | None:
    """Count the samples in a leaf; None if it is not split."""
    value, spec = tree.leaves[index], tree.specs[index]
    if spec is Replicate or isinstance(value, Microbatches):
        return None
    if (splitter := splitter_for(value)) is not None:
        return splitter.size(value) if splitter.size else None
    if not isinstance(value, torch.Tensor):
        return None
    dim = split_dim(spec)
    if -value.ndim <= dim < value.ndim:
        return value.shape[dim]
    name = tree.place(index)
    if value.ndim == 0:
        raise MicrobatchError(
            f"{name} is a single number and cannot be split into {microbatches} microbatches; write Replicate in its "
            "spec if every microbatch needs it",
            name=name,
        )
    raise MicrobatchError(f"{_describe(tree, index)} has no dimension {dim} to split", name=name)


def _disagreement(one: tuple[SpecTree, int, int], other: tuple[SpecTree, int, int]) -> MicrobatchError:
    small = min(one, other, key=lambda counted: counted[2])
    name = small[0].place(small[1])
    if small[2] == 1:
        advice = f"write Replicate in the spec of {name} if every microbatch needs all of it"
    else:
        advice = (
            "write TensorChunkSpec(dim) in the spec of one to split another dimension, Replicate if every microbatch "
            "needs all of it, or pass Microbatches([...]) with values that you split yourself"
        )
    return MicrobatchError(
        f"{_describe(*one[:2])} and {_describe(*other[:2])} have {one[2]} and {other[2]} samples; {advice}", name=name
    )


def _describe(tree: SpecTree, index: int) -> str:
    value = tree.leaves[index]
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"{tree.place(index)}{shape}"


def _samples(tree: SpecTree) -> int | None:
    for value, spec in zip(tree.leaves, tree.specs, strict=True):
        if isinstance(value, torch.Tensor) and spec is not Replicate and value.ndim:
            return value.shape[split_dim(spec)]
    return None
