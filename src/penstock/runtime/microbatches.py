"""Cut a batch into microbatches, and put the outputs together again.

A spec says how: ``TensorChunkSpec(dim)`` or ``Replicate`` for a leaf, or for everything below that place; in containers
like those of the value. Where it says nothing, a tensor is split along dimension 0 and anything else is given whole to
every microbatch. Sizes are those of ``torch.tensor_split``: the first microbatches have one sample more if it must be.

A tensor is never replicated unless the spec says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import MicrobatchError
from penstock.runtime.specs import Microbatches, Replicate, Spec, Splitter, TensorChunkSpec, splitter_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def split(value: Any, spec: Spec, microbatches: int, *, name: str = "value") -> list[Any]:
    """A value for each microbatch.

    >>> split(torch.arange(5), None, 2)
    [tensor([0, 1, 2]), tensor([3, 4])]
    >>> split(torch.tensor(1.0), None, 2, name="args[1]")
    Traceback (most recent call last):
    penstock.errors.MicrobatchError: args[1] is a single number and cannot be split into 2 microbatches; \
write Replicate in its spec if every microbatch needs it
    """
    return _split_together([_Tree.of(name, value, spec)], microbatches)[0]


def split_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target: Any,
    microbatches: int,
    args_spec: Spec = None,
    kwargs_spec: Spec = None,
    target_spec: Spec = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[Any]]:
    """The arguments, keyword arguments and target of each microbatch; all must have the same number of samples.

    >>> split_call((torch.arange(4),), {"scale": 2}, None, 2)
    ([(tensor([0, 1]),), (tensor([2, 3]),)], [{'scale': 2}, {'scale': 2}], [None, None])
    """
    given = args or kwargs or args_spec or kwargs_spec or target_spec
    if microbatches > 0 and not given and target is None:
        return [()] * microbatches, [{} for _ in range(microbatches)], [None] * microbatches
    trees = [
        _Tree.of("args", args, args_spec),
        _Tree.of("kwargs", kwargs or {}, kwargs_spec),
        _Tree.of("target", target, target_spec),
    ]
    arguments, keywords, targets = _split_together(trees, microbatches)
    return arguments, keywords, targets


def fitting(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target: Any,
    microbatches: int,
    args_spec: Spec = None,
    kwargs_spec: Spec = None,
    target_spec: Spec = None,
) -> int:
    """How many microbatches a batch can be split into: as many as asked for, or as it has samples.

    >>> fitting((torch.arange(3),), {"scale": 2}, None, 4)
    3
    """
    trees = [
        _Tree.of("args", args, args_spec),
        _Tree.of("kwargs", kwargs or {}, kwargs_spec),
        _Tree.of("target", target, target_spec),
    ]
    counts = [
        len(leaf) if isinstance(leaf, Microbatches) else _size(tree, index, microbatches)
        for tree in trees
        for index, leaf in enumerate(tree.leaves)
    ]
    return max(1, min([microbatches, *[count for count in counts if count is not None]]))


def sizes(total: int, microbatches: int) -> list[int]:
    """How many of ``total`` samples go into each microbatch.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    """
    least, more = divmod(total, microbatches)
    return [least + 1] * more + [least] * (microbatches - more)


def samples(value: Any, parts: Sequence[Any], spec: Spec = None) -> list[int] | None:
    """The number of samples in each microbatch of a value, by the first tensor that is split; None if there is none.

    >>> value = (torch.ones(5, 2), "text")
    >>> samples(value, split(value, None, 2))
    [3, 2]

    Args:
        value: the whole.
        parts: what it was split into; looked at if it came in parts.
        spec: how it was split.
    """
    if not is_split_already(value):
        total = _samples(_Tree.of("value", value, spec))
        return None if total is None else sizes(total, len(parts))
    found = [_samples(_Tree.of("microbatch", part, spec)) for part in parts]
    known = [count for count in found if count is not None]
    return known if len(known) == len(found) else None


def is_split_already(value: Any) -> bool:
    """Whether a value has parts that came as ``Microbatches``."""
    return any(isinstance(leaf, Microbatches) for leaf in pytree.tree_leaves(value, is_leaf=_is_leaf))


def merge(values: Sequence[Any], spec: Spec = None, *, name: str = "output") -> Any:
    """One value from those of all microbatches.

    Tensors are concatenated along the dimension of the spec, by default 0; single numbers (tensors without dimensions)
    are stacked. Anything else must be equal in all microbatches, unless its spec is ``Microbatches``: then the result
    has a ``Microbatches`` with all of them at that place.

    >>> merge([{"y": torch.ones(2), "loss": torch.tensor(0.5)}, {"y": torch.ones(1), "loss": torch.tensor(0.25)}])
    {'y': tensor([1., 1., 1.]), 'loss': tensor([0.5000, 0.2500])}
    """
    if not values:
        raise MicrobatchError(f"{name} has no microbatches, so there is nothing to merge", name=name)
    first = _Tree.of(name, values[0], spec)
    if first.treespec.is_leaf():
        return _merged(first, 0, values)
    taken_apart = [flattened(value) for value in values]
    for index, (_, treespec) in enumerate(taken_apart):
        if treespec != first.treespec:
            raise MicrobatchError(
                f"microbatch {index} gives another structure of {name} than microbatch 0, so they cannot be merged: "
                f"{treespec} and {first.treespec}",
                name=name,
            )
    columns = zip(*[leaves for leaves, _ in taken_apart], strict=True)
    merged = [_merged(first, index, column) for index, column in enumerate(columns)]
    return pytree.tree_unflatten(merged, first.treespec)


@dataclass(frozen=True, slots=True)
class _Tree:
    """A value taken apart, with a spec for each leaf."""

    name: str
    value: Any
    leaves: list[Any]
    treespec: Any
    specs: list[Spec]

    @classmethod
    def of(cls, name: str, value: Any, spec: Spec) -> _Tree:
        leaves, treespec = flattened(value)
        return cls(name, value, leaves, treespec, leaf_specs(spec, value, len(leaves), name))

    def place(self, index: int) -> str:
        """The name of a leaf, as a user would write it."""
        try:
            found, _ = pytree.tree_flatten_with_path(self.value, is_leaf=_is_leaf)
        except ValueError:  # a type that was registered without names for its children
            return f"{self.name} (leaf {index})"
        return self.name + pytree.keystr(found[index][0])


def flattened(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a value, and its structure.

    Torch's own function leaves objects behind that only the garbage collector can free; a step should leave none, so it
    is asked only where something is nested.
    """
    if _is_single(value):
        return [value], _flat_structure(None)
    if type(value) in (tuple, dict):
        children = list(value.values() if type(value) is dict else value)
        if all(map(_is_single, children)):
            return children, _flat_structure(tuple(value) if type(value) is dict else len(value))
    return pytree.tree_flatten(value, is_leaf=_is_leaf)


def _is_single(value: Any) -> bool:
    """Whether a value is a leaf; quickly for what most of them are."""
    return type(value) is torch.Tensor or pytree.tree_is_leaf(value, is_leaf=_is_leaf)


@lru_cache(maxsize=256)
def _flat_structure(kind: tuple[Any, ...] | int | None) -> Any:
    """The structure of a leaf, of a tuple with so many of them, or of a dictionary with these keys."""
    if kind is None:
        return pytree.tree_structure(0)
    return pytree.tree_structure(dict.fromkeys(kind, 0) if isinstance(kind, tuple) else (0,) * kind)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Microbatches) or _splitter(value) is not None


def _splitter(value: Any) -> Splitter | None:
    return splitter_of(type(value))


def leaf_specs(spec: Spec, value: Any, count: int, name: str) -> list[Spec]:
    """A spec for each of the leaves of a value, of which there are ``count``."""
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
        raise MicrobatchError(f"the spec of {name} has {unknown[0]!r}, which {name} has not", name=name)
    return [(spec.get(key), child, f"{name}[{key!r}]") for key, child in value.items()]


def _by_field(spec: Any, value: Any, name: str) -> list[tuple[Spec, Any, str]]:
    # By name: torch leaves out the fields that are None, and those of the spec may be others.
    try:
        inner, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    except ValueError:  # registered without names for its children
        return _by_place(spec, value, name)
    names = [pytree.keystr(path) for path, _ in inner]
    return [(getattr(spec, key[1:]), child, name + key) for key, (_, child) in zip(names, inner, strict=True)]


def _by_place(spec: Any, value: Any, name: str) -> list[tuple[Spec, Any, str]]:
    specs, children = _children(spec) or [], _children(value)
    if children is None or len(children) != len(specs):
        held = "is no container" if children is None else f"holds {len(children)}"
        raise MicrobatchError(f"the spec of {name} is for {len(specs)} values, but {name} {held}", name=name)
    return [(spec, child, f"{name}[{index}]") for index, (spec, child) in enumerate(zip(specs, children, strict=True))]


def _children(value: Any) -> list[Any] | None:
    """What a container holds; None for a leaf."""
    if _is_leaf(value):
        return None
    children, treespec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    return None if treespec.is_leaf() else children


def _count(value: Any) -> int:
    return len(pytree.tree_leaves(value, is_leaf=_is_leaf))


def _split_together(trees: list[_Tree], microbatches: int) -> list[list[Any]]:
    if microbatches < 1:
        raise MicrobatchError(f"{microbatches} microbatches cannot be made; 1 is the least")
    _agree(trees, microbatches)
    return [_split_tree(tree, microbatches) for tree in trees]


def _split_tree(tree: _Tree, microbatches: int) -> list[Any]:
    columns = [_pieces(tree, index, microbatches) for index in range(len(tree.leaves))]
    if tree.treespec.is_leaf():
        return list(columns[0])
    rows = zip(*columns, strict=True) if columns else [()] * microbatches
    value = tree.value
    # Arguments are most often flat: then there is no need to ask torch to build each again, which takes its time.
    if type(value) in (tuple, dict) and len(value) == len(columns) == tree.treespec.num_nodes - 1:
        return list(rows) if type(value) is tuple else [dict(zip(value, row, strict=True)) for row in rows]
    return [pytree.tree_unflatten(row, tree.treespec) for row in rows]


def _pieces(tree: _Tree, index: int, microbatches: int) -> Sequence[Any]:
    """A leaf, for each microbatch."""
    value, spec = tree.leaves[index], tree.specs[index]
    if isinstance(value, Microbatches):
        return _given(tree, index, value, microbatches)
    if spec is Replicate:
        return [value] * microbatches
    if (splitter := _splitter(value)) is not None:
        return _custom(tree, index, splitter, microbatches)
    if not isinstance(value, torch.Tensor):
        return _shared(tree, index, microbatches)
    return cut(value, _dim(spec), microbatches)


def pieces(tensor: torch.Tensor, spec: Spec, microbatches: int) -> Sequence[torch.Tensor]:
    """A tensor that is known to be as its spec says, for each microbatch."""
    return [tensor] * microbatches if spec is Replicate else cut(tensor, _dim(spec), microbatches)


def cut(tensor: torch.Tensor, dim: int, microbatches: int) -> Sequence[torch.Tensor]:
    """Parts that share memory with the tensor, and that a module may change in place."""
    lengths = sizes(tensor.shape[dim], microbatches)
    if not tensor.requires_grad:
        # Not views to autograd: a change of one in place would else become history of all the others.
        return torch.unsafe_split_with_sizes(tensor, lengths, dim)
    # One by one: of several views made at once, autograd lets none be changed in place.
    starts = accumulate(lengths[:-1], initial=0)
    return [tensor.narrow(dim, start, length) for start, length in zip(starts, lengths, strict=True)]


def _given(tree: _Tree, index: int, value: Microbatches, microbatches: int) -> Sequence[Any]:
    if len(value) == microbatches:
        return value.values
    name = tree.place(index)
    raise MicrobatchError(f"{name} is given as {len(value)} microbatches, but {microbatches} are run", name=name)


def _custom(tree: _Tree, index: int, splitter: Splitter, microbatches: int) -> Sequence[Any]:
    kind = type(tree.leaves[index]).__qualname__
    if (dim := _dim(tree.specs[index])) != 0:
        name = tree.place(index)
        raise MicrobatchError(f"{name} is a {kind}, which its splitter splits, not along dimension {dim}", name=name)
    pieces = splitter.split(tree.leaves[index], microbatches)
    if len(pieces) == microbatches:
        return pieces
    name = tree.place(index)
    raise MicrobatchError(
        f"the splitter of {kind} has made {len(pieces)} microbatches of {name}, not {microbatches}", name=name
    )


def _shared(tree: _Tree, index: int, microbatches: int) -> Sequence[Any]:
    value = tree.leaves[index]
    if not holds_tensors(value):
        return [value] * microbatches
    name, kind = tree.place(index), type(value).__qualname__
    raise MicrobatchError(
        f"{name} is a {kind} that holds tensors, and how to split it is not known; call register_splitter({kind}, ...) "
        "or write Replicate in its spec if every microbatch needs all of it",
        name=name,
    )


def holds_tensors(value: Any) -> bool:
    """Whether an object of the user's own has tensors in it that may be part of the batch."""
    if type(value).__module__ == "builtins" or callable(value):
        return False
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", ()))
    inner = [getattr(value, name, None) for name in names]
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(inner))


def _dim(spec: Spec) -> int:
    return spec.split_dim if isinstance(spec, TensorChunkSpec) else 0


def _agree(trees: list[_Tree], microbatches: int) -> None:
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
            f"{_seen(tree, index)} cannot be split into {microbatches} microbatches: it has {size} along "
            f"dimension {_dim(tree.specs[index])}; give at least {microbatches} samples (drop a last batch that is "
            "smaller) or a schedule of fewer microbatches; if another dimension counts the samples, write "
            "TensorChunkSpec(dim) in its spec",
            name=name,
        )


def _size(tree: _Tree, index: int, microbatches: int) -> int | None:
    """The number of samples in a leaf; None if it is not split."""
    value, spec = tree.leaves[index], tree.specs[index]
    if spec is Replicate or isinstance(value, Microbatches):
        return None
    if (splitter := _splitter(value)) is not None:
        return splitter.size(value) if splitter.size else None
    if not isinstance(value, torch.Tensor):
        return None
    dim = _dim(spec)
    if -value.ndim <= dim < value.ndim:
        return value.shape[dim]
    name = tree.place(index)
    if value.ndim == 0:
        raise MicrobatchError(
            f"{name} is a single number and cannot be split into {microbatches} microbatches; write Replicate in its "
            "spec if every microbatch needs it",
            name=name,
        )
    raise MicrobatchError(f"{_seen(tree, index)} has no dimension {dim} to split", name=name)


def _disagreement(one: tuple[_Tree, int, int], other: tuple[_Tree, int, int]) -> MicrobatchError:
    small = min(one, other, key=lambda counted: counted[2])
    name = small[0].place(small[1])
    if small[2] == 1:
        advice = f"write Replicate in the spec of {name} if every microbatch needs all of it"
    else:
        advice = (
            "write TensorChunkSpec(dim) in the spec of one to split another dimension, Replicate if every microbatch "
            "needs all of it, or pass Microbatches([...]) with what you have split yourself"
        )
    return MicrobatchError(
        f"{_seen(*one[:2])} and {_seen(*other[:2])} have {one[2]} and {other[2]} samples; {advice}", name=name
    )


def _seen(tree: _Tree, index: int) -> str:
    value = tree.leaves[index]
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"{tree.place(index)}{shape}"


def _samples(tree: _Tree) -> int | None:
    for value, spec in zip(tree.leaves, tree.specs, strict=True):
        if isinstance(value, torch.Tensor) and spec is not Replicate and value.ndim:
            return value.shape[_dim(spec)]
    return None


def _merged(tree: _Tree, index: int, column: Sequence[Any]) -> Any:
    """One leaf from those of all microbatches."""
    first, spec = column[0], tree.specs[index]
    if spec is Microbatches:
        return Microbatches(list(column))
    if spec is not Replicate:
        if (splitter := _splitter(first)) is not None and splitter.merge is not None:
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


def _joined(tree: _Tree, index: int, column: Sequence[torch.Tensor]) -> torch.Tensor:
    dim = _dim(tree.specs[index])
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
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
