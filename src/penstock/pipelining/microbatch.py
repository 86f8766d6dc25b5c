"""Batches into microbatches and outputs back, by the rules of ``torch.distributed.pipelining.microbatch``.

They build on ``penstock.execution.microbatches.split`` and differ from it: values need not have the same number of
samples, and if one has fewer samples than there should be microbatches, only that many are made.
"""

from __future__ import annotations

import logging
import operator
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.errors import MicrobatchError
from penstock.execution.microbatches.block_masks import split_mask
from penstock.execution.microbatches.spec_tree import flatten, leaf_specs
from penstock.execution.microbatches.specs import Replicate as _Replicate
from penstock.execution.microbatches.specs import TensorChunkSpec, splitter_of
from penstock.execution.microbatches.split import holds_tensors, sizes, slice_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks"]

logger = logging.getLogger(__name__)

#: For comparisons of numbers: microbatches are as large as the batch, with zeros in place of all other samples.
_debug_mask_minibatches = False

DEFAULT_CHUNK_DIM = 0


class _ChunkError(MicrobatchError, AssertionError):
    """A spec that does not fit the value, or values that do not fit each other."""


class _ChunkValueError(MicrobatchError, ValueError):
    """A value that cannot be treated as its spec says."""


class _ChunkSpecError(_ChunkError, ValueError):
    """A spec that is none, or of another structure; torch raises the one or the other."""


class _ChunkIndexError(MicrobatchError, IndexError):
    """A tensor that has not the dimension of its spec."""


class _CustomReducer:
    """In the spec of a merge: make one value of those of all microbatches.

    >>> merge_chunks([{"loss": 1.0}, {"loss": 2.0}], {"loss": _CustomReducer(0.5, operator.add)})
    {'loss': 3.5}
    """

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


class _LossReducer(_CustomReducer):
    """The same, for losses."""


sum_reducer = _LossReducer(torch.tensor(0.0), operator.add)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The arguments and keyword arguments of each microbatch.

    >>> split_args_kwargs_into_chunks((torch.arange(3),), {"scale": 2}, 2)
    ([(tensor([0, 1]),), (tensor([2]),)], [{'scale': 2}, {'scale': 2}])

    Args:
        args: the arguments.
        kwargs: the keyword arguments.
        chunks: how many microbatches to make; fewer are made if a tensor has fewer samples.
        args_chunk_spec: a spec for each leaf of the arguments. By default tensors and block masks are split along
            dimension 0, and anything else is given to every microbatch.
        kwargs_chunk_spec: the same for the keyword arguments.
    """
    if not kwargs and args_chunk_spec is None and _are_tensors(args):
        spec = TensorChunkSpec(DEFAULT_CHUNK_DIM)
        count = min([chunks, *(_samples(tensor, spec) for tensor in args)])
        if count > 0:
            columns = [_split_tensor(tensor, spec, count) for tensor in args]
            return list(zip(*columns, strict=True)), [{} for _ in range(count)]
    by_place, by_name = _Values.of(tuple(args), args_chunk_spec), _Values.of(kwargs or {}, kwargs_chunk_spec)
    count = min(by_place.most(chunks), by_name.most(chunks))
    return by_place.split(count), by_name.split(count)


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """One value from those of all microbatches, in the structure of the spec.

    Where the spec has a ``TensorChunkSpec``, tensors are concatenated along its dimension; where it has a reducer, this
    is called; anything else says that the values are equal. Without a spec, tensors are concatenated along dimension 0.

    >>> merge_chunks([(torch.ones(1), 5), (torch.ones(2), 5)], (TensorChunkSpec(0), None))
    (tensor([1., 1., 1.]), 5)
    """
    if chunk_spec is None and _are_tensors(chunks):
        return _merged(TensorChunkSpec(DEFAULT_CHUNK_DIM), list(chunks))
    rows = [flatten(chunk)[0] for chunk in chunks]
    if chunk_spec is None:
        treespec = flatten(chunks[0])[1]
        specs = [TensorChunkSpec(DEFAULT_CHUNK_DIM) if isinstance(leaf, torch.Tensor) else None for leaf in rows[0]]
    else:
        specs, treespec = tree_flatten(chunk_spec)
    for index, row in enumerate(rows):
        if len(row) != len(specs):
            raise _ChunkValueError(
                f"microbatch {index} has {len(row)} values, but the spec {chunk_spec!r} is for {len(specs)}"
            )
    columns: list[list[Any]] = [[row[index] for row in rows] for index in range(len(specs))]
    return tree_unflatten([_merged(*pair) for pair in zip(specs, columns, strict=True)], treespec)


def _are_tensors(values: Sequence[Any]) -> bool:
    """Whether there are plain tensors, and nothing else: as most often, and then quickly done."""
    for value in values:
        if type(value) is not torch.Tensor:
            return False
    return len(values) > 0


def _shard_dict_of_args(args_dict: dict[Any, Any], args_chunk_spec: Any, num_chunks: int) -> list[dict[Any, Any]]:
    """A dictionary for each microbatch."""
    if args_dict and args_chunk_spec is None:
        raise _ChunkError(f"no spec for {list(args_dict)}")
    values = _Values.of(args_dict, args_chunk_spec)
    return values.split(values.most(num_chunks))


@dataclass(frozen=True, slots=True)
class _Values:
    """Arguments taken apart, with a spec for each leaf."""

    whole: Any
    leaves: list[Any]
    treespec: Any
    specs: list[Any]

    @classmethod
    def of(cls, whole: tuple[Any, ...] | dict[Any, Any], spec: Any) -> _Values:
        leaves, treespec = flatten(whole)
        if spec is None or not whole:
            return cls(whole, leaves, treespec, [_default_spec(leaf) for leaf in leaves])
        if len(whole) != len(spec):
            names = [list(one) if isinstance(one, dict) else len(one) for one in (whole, spec)]
            raise _ChunkError(f"the values are {names[0]}, but the specs are for {names[1]}")
        try:
            return cls(whole, leaves, treespec, leaf_specs(spec, whole, len(leaves), "chunk_spec"))
        except MicrobatchError as error:
            raise _ChunkSpecError(str(error), name=error.name) from None

    def most(self, wanted: int) -> int:
        """How many microbatches can be made: as many as wanted, or as there are samples."""
        return min([wanted, *(_size(leaf, spec, wanted) for leaf, spec in zip(self.leaves, self.specs, strict=True))])

    def split(self, count: int) -> list[Any]:
        """The values of each microbatch."""
        if count < 1:
            raise MicrobatchError(f"cannot make {count} microbatches; does a tensor have no samples?")
        columns = [_pieces(leaf, spec, count) for leaf, spec in zip(self.leaves, self.specs, strict=True)]
        rows = list(zip(*columns, strict=True)) if columns else [()] * count
        if len(self.leaves) != len(self.whole) or self.treespec.num_nodes != len(self.whole) + 1:
            return [tree_unflatten(list(row), self.treespec) for row in rows]
        # Flat: no need to ask torch to build it again.
        return [dict(zip(self.whole, row, strict=True)) for row in rows] if isinstance(self.whole, dict) else rows


def _split_tensor(tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int) -> Sequence[torch.Tensor]:
    """A tensor for each microbatch. A leaf's parts keep their gradients, as they are the inputs of a stage."""
    if _samples(tensor, spec) < num_chunks:
        raise _ChunkError(
            f"a tensor of shape {list(tensor.shape)} cannot be split into {num_chunks} microbatches along "
            f"dimension {spec.split_dim}"
        )
    if isinstance(tensor, DTensor):
        parts = _split_dtensor(tensor, spec.split_dim, num_chunks)
    else:
        parts = slice_tensor(tensor, spec.split_dim, num_chunks)
    if tensor.requires_grad and tensor.is_leaf:
        for part in parts:
            part.retain_grad()
    return _masked(tensor, parts, spec.split_dim) if _debug_mask_minibatches else parts


def _split_block_mask(block_mask: BlockMask, num_chunks: int) -> list[BlockMask]:
    """The mask of each microbatch: its samples, or all of it if it is for a batch of any size."""
    batch = block_mask.shape[0]
    if 1 != batch < num_chunks:
        raise _ChunkError(f"a block mask of {batch} samples cannot be split into {num_chunks} microbatches")
    return split_mask(block_mask, num_chunks)


def _default_spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or _is_split(value):
        return TensorChunkSpec(DEFAULT_CHUNK_DIM)
    if holds_tensors(value):
        warnings.warn(
            f"a {type(value).__qualname__} that contains tensors is passed whole to every microbatch; register a "
            "splitter with penstock.runtime.register_splitter, or write _Replicate() in its chunk spec if that is "
            "intended",
            UserWarning,
            stacklevel=5,
        )
    return _Replicate


def _is_split(value: Any) -> bool:
    """Whether it is not a tensor, but has a registered splitter."""
    return splitter_of(type(value)) is not None


def _size(value: Any, spec: Any, most: int) -> int:
    """How many microbatches can be made of a value."""
    if spec is _Replicate:
        return most
    if not (isinstance(value, torch.Tensor) or _is_split(value)):
        raise _ChunkValueError(f"{value!r} cannot be split by {spec!r}; write _Replicate() for it")
    if not isinstance(spec, TensorChunkSpec):
        raise _ChunkError(
            f"the spec of a {type(value).__qualname__} is {spec!r}; write TensorChunkSpec or _Replicate()"
        )
    if isinstance(value, torch.Tensor):
        return _samples(value, spec)
    if spec.split_dim != 0:
        raise _ChunkError(f"a {type(value).__qualname__} is split along dimension 0, not {spec.split_dim}")
    splitter = splitter_of(type(value))
    size = splitter.size(value) if splitter is not None and splitter.size is not None else None
    return most if size is None else size


def _samples(tensor: torch.Tensor, spec: TensorChunkSpec) -> int:
    if -tensor.ndim <= spec.split_dim < tensor.ndim:
        return tensor.shape[spec.split_dim]
    raise _ChunkIndexError(
        f"a tensor of shape {list(tensor.shape)} has no dimension {spec.split_dim} to split; write _Replicate() in its "
        "chunk spec if every microbatch needs it"
    )


def _pieces(value: Any, spec: Any, count: int) -> Sequence[Any]:
    """A value for each microbatch."""
    if spec is _Replicate:
        return [value] * count
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, spec, count)
    if isinstance(value, BlockMask):
        return _split_block_mask(value, count)
    splitter = splitter_of(type(value))
    return [] if splitter is None else splitter.split(value, count)


def _split_dtensor(tensor: DTensor, dim: int, count: int) -> Sequence[torch.Tensor]:
    """Parts that are distributed like the whole.

    Each rank splits what it has, without communication. The sizes of the parts are those of the whole tensor's.
    """
    parts = []
    here = torch.tensor_split(tensor.to_local(), count, dim)
    for local, size in zip(here, sizes(tensor.shape[dim], count), strict=True):
        shape = list(tensor.shape)
        shape[dim] = size
        parts.append(_distributed(local, tensor, torch.Size(shape)))
    return parts


def _distributed(local: torch.Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=like.stride()
    )


def _merged(spec: Any, values: Sequence[Any]) -> Any:
    if isinstance(spec, _CustomReducer):
        reduced = spec.init_value
        for value in values:
            reduced = spec.reduce_fn(reduced, value)
        return reduced
    if isinstance(spec, TensorChunkSpec):
        values = _unmasked(values, spec.split_dim) if _debug_mask_minibatches else values
        return _joined(values, spec.split_dim)
    for index, value in enumerate(values[1:], 1):
        if not _equal(values[0], value):
            raise _ChunkError(
                f"microbatch {index} has {value!r} where microbatch 0 has {values[0]!r}; "
                "write a TensorChunkSpec or a reducer for it in the spec of the merge"
            )
    return values[0]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


def _joined(values: Sequence[Any], dim: int) -> torch.Tensor:
    distributed = [isinstance(value, DTensor) for value in values]
    if not any(distributed):
        # Single numbers, e.g. losses, become a tensor of them.
        single = all(isinstance(value, torch.Tensor) and value.ndim == 0 for value in values)
        return torch.stack(list(values)) if values and single else torch.cat(list(values), dim=dim)
    if not all(distributed):
        raise _ChunkError("some microbatches have a DTensor where others have a plain tensor; a mix cannot be merged")
    for index, value in enumerate(values):
        if value.placements != values[0].placements:
            raise _ChunkError(
                f"placement mismatch: microbatch {index} has {value.placements}, microbatch 0 {values[0].placements}"
            )
    shape = list(values[0].shape)
    shape[dim] = sum(value.shape[dim] for value in values)
    local = torch.cat([value.to_local() for value in values], dim=dim)
    return _distributed(local, values[0], torch.Size(shape))


def _masked(whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """The parts in their places, and zeros around them."""
    if isinstance(whole, DTensor):
        inner = _masked(whole.to_local(), [part.to_local() for part in parts if isinstance(part, DTensor)], dim)
        return [_distributed(part, whole, whole.shape) for part in inner]
    masked, begin = [], 0
    for part in parts:
        placed = torch.zeros_like(whole)
        placed.narrow(dim, begin, part.shape[dim]).copy_(part)
        masked.append(placed)
        begin += part.shape[dim]
    return masked


def _unmasked(values: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """From each of some tensors of one shape the part that is its own."""
    if len({value.shape for value in values}) > 1:
        raise _ChunkError(f"masked microbatches must have one shape, not {[list(value.shape) for value in values]}")
    lengths = sizes(values[0].shape[dim], len(values))
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    return [value.narrow(dim, *place) for value, *place in zip(values, begins, lengths, strict=True)]
