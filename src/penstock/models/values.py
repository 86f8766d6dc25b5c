"""Describes what modules take and return: leaves, structure, and shapes in terms of the arguments' shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from math import prod
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from penstock.errors import SplitError
from penstock.models.record import Leaf, Value, dtype_of

_CONSTANTS: Final = (type(None), bool, int, float, str)
_DEEPEST: Final = 16


def leaves_of(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yield the leaves of a value, also of mappings and dataclasses that torch's trees do not open.

    >>> list(leaves_of(((1, [2]), {"mask": 3})))
    [1, 2, 3]
    """
    found: dict[str, Any] = {}
    _collect(value, "", found, depth)
    yield from found.values()


def leaves_by_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a call's arguments by where they are, so that others may come and go.

    >>> leaves_by_path((1, [2]), {"mask": {"full": None}})
    {'0': 1, '1.0': 2, 'mask.full': None}
    """
    found: dict[str, Any] = {}
    for name, value in (*((str(number), value) for number, value in enumerate(args)), *kwargs.items()):
        _collect(value, name, found, _DEEPEST)
    return found


def _collect(value: Any, path: str, found: dict[str, Any], depth: int) -> None:
    inner: Iterable[tuple[Any, Any]]
    if isinstance(value, torch.Tensor) or not depth:
        inner = ()
    elif isinstance(value, Mapping):
        inner = [(key, value[key]) for key in list(value)]
    elif isinstance(value, (tuple, list)):
        inner = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        inner = ()
    found.setdefault(path, value)
    for key, one in inner:
        found.pop(path, None)
        _collect(one, f"{path}.{key}", found, depth - 1)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def flatten(value: Any, owner: str) -> tuple[list[Any], str]:
    """Return the leaves of what a module returned, and the structure as text."""
    leaves, spec = pytree.tree_flatten(value)
    if spec.is_leaf():
        return leaves, ""
    try:
        return leaves, pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise SplitError(
            f"{owner!r} returns a {type(value).__name__}, whose structure cannot be stored: {error}", unit=owner
        ) from None


def describe_leaf(leaf: Any, arguments: Sequence[Any], passed: int | None, own: Collection[int] = ()) -> Leaf:
    """Describe a leaf of what a module returned.

    Args:
        leaf: the leaf.
        arguments: the tensors and whole numbers that the module was given.
        passed: the number of the leaf among the arguments, if it is one of them.
        own: the sizes of the module's parameters.
    """
    if passed is not None:
        return Leaf("passed", passed)
    if isinstance(leaf, torch.Tensor):
        return describe_tensor_leaf(leaf, arguments, own)
    if type(leaf) in _CONSTANTS:
        return Leaf("constant", leaf)
    return Leaf("opaque", _name_of(leaf))


def describe_keyword(name: str, value: Any) -> tuple[tuple[str, Leaf], ...]:
    """Describe the leaves of a keyword argument, by where they are in it."""
    return tuple((path, describe_leaf(leaf, (), None)) for path, leaf in leaves_by_path((), {name: value}).items())


def find_mismatch(leaf: Leaf, value: Any) -> tuple[str, str] | None:
    """Say how a value is not what was recorded: what the record has, and what the value is; None if it is alike.

    Sizes may differ, and the precision of numbers.

    >>> leaf = describe_leaf(torch.zeros(2, 3), (), None)
    >>> find_mismatch(leaf, torch.zeros(9, 9)), find_mismatch(leaf, None)
    (None, ('was a float tensor of 2 dimensions', 'is None'))
    >>> find_mismatch(Leaf("constant", 1.0), 2.0)
    ('was 1.0', 'is 2.0')
    """
    if leaf.kind == "tensor":
        dtype = dtype_of(leaf.dtype)
        is_alike = isinstance(value, torch.Tensor) and value.ndim == len(leaf.size)
        if is_alike and (value.dtype is dtype or _kind(value.dtype) == _kind(dtype)):
            return None
        return f"was {_describe_kind(dtype, len(leaf.size))}", f"is {_describe_value(value)}"
    if leaf.kind == "constant":
        is_equal = type(value) is type(leaf.value) and (value == leaf.value or value != value != leaf.value)
        return None if is_equal else (f"was {leaf.value!r}", f"is {_describe_value(value)}")
    if isinstance(value, torch.Tensor) or _name_of(value) != leaf.value:
        return f"was a {leaf.value}", f"is {_describe_value(value)}"
    return None


def _name_of(value: Any) -> str:
    """Return what can be compared of an object: a constant itself, else its type."""
    return str(value) if isinstance(value, (torch.dtype, torch.device, Enum)) else type(value).__name__


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype is torch.bool else "integer"


def _describe_kind(dtype: torch.dtype, dimensions: int) -> str:
    article = "an" if _kind(dtype) == "integer" else "a"
    return f"{article} {_kind(dtype)} tensor of {dimensions} dimensions"


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _describe_kind(value.dtype, value.ndim)
    return repr(value) if type(value) in _CONSTANTS else f"a {_name_of(value)}"


def describe_tensor_leaf(tensor: torch.Tensor, arguments: Sequence[Any] = (), own: Collection[int] = ()) -> Leaf:
    """Describe a tensor, its shape by those of the arguments."""
    shape = describe_shape(tensor.shape, arguments, own)
    return Leaf("tensor", None, dtype_name(tensor), shape, tensor.requires_grad, tuple(tensor.shape))


def describe_value(value: Any, arguments: Sequence[Any], owner: str) -> Value:
    """Describe a whole value that is not one of the arguments."""
    leaves, spec = flatten(value, owner)
    return Value(spec, tuple(describe_leaf(leaf, arguments, None) for leaf in leaves))


def describe_shape(
    shape: Sequence[int], arguments: Sequence[Any], own: Collection[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Describe a shape by those of the arguments, so that it follows when their sizes change.

    >>> ids, hidden = torch.zeros(2, 7), torch.zeros(2, 7, 16)
    >>> describe_shape((2, 7, 16), [ids])
    ((0, 0), (0, 1), (16,))
    >>> describe_shape((14, 4), [hidden])
    ((0, 0, 1), (4,))
    >>> describe_shape((2, 7, 16), [2, 7])  # whole numbers are used if no tensor fits
    ((0, -1), (1, -1), (16,))
    >>> describe_shape((2, 7, 7), [ids], own=[7])  # the width of an embedding
    ((0, 0), (0, 1), (7,))
    """
    tensors = [(number, one.shape) for number, one in enumerate(arguments) if isinstance(one, torch.Tensor)]
    # The most similar shape first: that a table has one row, too, may be chance.
    tensors.sort(key=lambda tensor: -sum(ours == theirs for ours, theirs in zip(shape, tensor[1], strict=False)))
    sizes = []
    for position, size in enumerate(shape):
        is_last = position == len(shape) - 1
        sizes.append(_describe_size(size, position, tensors, arguments) or _find_size(size, is_last, tensors, own))
    return tuple(sizes)


def _describe_size(
    size: int, position: int, tensors: Sequence[tuple[int, Sequence[int]]], arguments: Sequence[Any]
) -> tuple[int, ...]:
    for number, shape in tensors:
        if position < len(shape) and shape[position] == size:
            return (number, position)
    for number, shape in tensors:
        if not position and len(shape) > 1 and shape[0] * shape[1] == size:
            return (number, 0, 1)
    return next(((number, -1) for number, one in enumerate(arguments) if type(one) is int and one == size), ())


def _find_size(
    size: int, is_last: bool, tensors: Sequence[tuple[int, Sequence[int]]], own: Collection[int]
) -> tuple[int, ...]:
    """Look for a size in another position; the number of samples is not looked for in the last one: classes are."""
    for number, shape in tensors if size > 1 and size not in own else ():
        if list(shape).count(size) == 1 and not (is_last and shape[0] == size):
            return (number, list(shape).index(size))
    return (size,)


def actual_shape(leaf: Leaf, arguments: Sequence[Any], shape: Sequence[Sequence[int]] | None = None) -> list[int]:
    """Return the shape of a tensor that was described, given the arguments; the recorded size where one is missing."""
    shape = leaf.shape if shape is None else shape
    return [actual_size(size, recorded, arguments) for size, recorded in zip(shape, leaf.size, strict=True)]


def actual_size(size: Sequence[int], recorded: int, arguments: Sequence[Any]) -> int:
    """Return one dimension of a shape that was described, given the arguments."""
    if len(size) == 1:
        return size[0]
    argument, *dimensions = size
    if dimensions == [-1]:
        return arguments[argument] if type(arguments[argument]) is int else recorded
    if not isinstance(arguments[argument], torch.Tensor) or arguments[argument].ndim <= max(dimensions):
        return recorded
    return prod(arguments[argument].shape[dimension] for dimension in dimensions)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's element type.

    >>> dtype_name(torch.zeros(1))
    'float32'
    """
    return str(tensor.dtype).removeprefix("torch.")
