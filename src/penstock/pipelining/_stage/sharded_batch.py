"""Batches whose samples are sharded over ranks.

A DTensor that is sharded along the dimension to split is split by each rank on its own, without a message, as in torch.
So a microbatch holds some samples of every shard: with 8 samples on 2 ranks, microbatch 1 of 4 has samples 1 and 5.
That is right where everything that belongs to these samples is sharded alike. A target that is not would be compared
with the outputs of other samples, so it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.execution.microbatches.spec_tree import SpecTree, flatten
from penstock.execution.microbatches.specs import TensorChunkSpec
from penstock.pipelining.microbatch import DEFAULT_CHUNK_DIM, _ChunkValueError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Samples(NamedTuple):
    """How many samples there are, and how many of them are on this rank."""

    total: int
    local: int

    @classmethod
    def of(cls, tensor: torch.Tensor, dim: int) -> Samples:
        """Count the samples of a tensor along a dimension."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return cls(tensor.shape[dim], local.shape[dim])

    def __str__(self) -> str:
        return f"has {self.total} samples, of which this rank holds {'all' if self.is_whole else self.local}"

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every sample."""
        return self.local == self.total

    def conflicts_with(self, other: Samples) -> bool:
        """Whether the same samples are sharded in another way."""
        return self.total == other.total and self.local != other.local


#: In a message, for a batch that is not known.
NOT_KNOWN: Final = Samples(0, 0)


def count_samples(name: str, whole: Any, spec: Any) -> dict[str, Samples]:
    """Count the samples of every tensor that is split, by its name.

    >>> count_samples("args", (torch.ones(4, 2), "text"), None)
    {'args[0]': Samples(total=4, local=4)}
    """
    if isinstance(whole, (tuple, dict)) and not whole:  # on this rank, so that the spec is not for it
        return {}
    values = SpecTree.of(name, whole, spec)
    return {
        values.place(index): Samples.of(leaf, DEFAULT_CHUNK_DIM if leaf_spec is None else leaf_spec.split_dim)
        for index, (leaf, leaf_spec) in enumerate(zip(values.leaves, values.specs, strict=True))
        if isinstance(leaf, torch.Tensor) and leaf.ndim and (leaf_spec is None or type(leaf_spec) is TensorChunkSpec)
    }


def check_samples(counts: Mapping[str, Samples], batch: Samples | None, microbatches: int) -> None:
    """Refuse values that would not be split into the same microbatches as the batch.

    Args:
        counts: the samples of what this rank splits, by name.
        batch: the samples of the batch, on the rank of the first stage.
        microbatches: how many microbatches there are.
    """
    if microbatches == 1:
        return
    known = {} if batch is None else {"the batch of the first stage": batch}
    for name, samples in counts.items():
        if not samples.is_whole and not _gives_equal_parts(samples, microbatches):
            raise _ChunkValueError(
                f"{name} {samples}; each rank splits its own samples, and these do not give {microbatches} "
                f"microbatches of equal size; make the number of samples a multiple of {microbatches} times the "
                "number of shards",
                name=name,
            )
        for other, its_samples in known.items():
            if samples.conflicts_with(its_samples):
                raise _ChunkValueError(
                    f"{name} {samples}, but {other} {its_samples}. Each rank splits its own samples, so their "
                    "microbatches would hold different ones; distribute both with the same placements, or split them "
                    "yourself and pass arg_mbs, kwarg_mbs and target_mbs",
                    name=name,
                )
        known.setdefault(name, samples)


def check_same_sharding(batch: Samples | None, agreed: Samples | None) -> None:
    """Refuse a later batch whose samples are in other microbatches than the rank of the last stage expects.

    Args:
        batch: the samples of the batch of this step; None if the user split it.
        agreed: those of the batch for which the stages were prepared.
    """
    if _shards(batch) != _shards(agreed):
        raise _ChunkValueError(
            f"this step's batch is {_describe_sharding(batch)}, but the batch for which the stages were prepared was "
            f"{_describe_sharding(agreed)}, so outputs and targets would be of other samples; use a second schedule "
            "for batches of the other form",
            name="args",
        )


def _shards(samples: Samples | None) -> int | None:
    return None if samples is None else samples.total // max(samples.local, 1)


def _describe_sharding(samples: Samples | None) -> str:
    if samples is None:
        return "split by the caller"
    return "not sharded" if samples.is_whole else f"in {_shards(samples)} shards"


def _gives_equal_parts(samples: Samples, microbatches: int) -> bool:
    return samples.local > 0 and samples.local % microbatches == 0 and samples.total % samples.local == 0


def has_dtensors(value: Any) -> bool:
    """Whether a DTensor is among the leaves of a value."""
    return type(value) is not torch.Tensor and any(isinstance(leaf, DTensor) for leaf in flatten(value)[0])


def restore_order(merged: Any, spec: Any, batch: Samples, microbatches: int) -> Any:
    """Put merged outputs into the order of the batch where they are sharded in another way."""
    leaves, treespec = tree_flatten(merged)
    specs = [_BY_DEFAULT] * len(leaves) if spec is None else tree_flatten(spec)[0]
    for index, (leaf, leaf_spec) in enumerate(zip(leaves, specs, strict=True)):
        if not (isinstance(leaf, torch.Tensor) and leaf.ndim and isinstance(leaf_spec, TensorChunkSpec)):
            continue
        samples = Samples.of(leaf, leaf_spec.split_dim)
        if not samples.conflicts_with(batch):
            continue
        shards = batch.total // min(batch.local, samples.local)
        sizes = (shards, microbatches) if batch.is_whole else (microbatches, shards)
        leaves[index] = _swap(leaf, leaf_spec.split_dim % leaf.ndim, sizes)
    return tree_unflatten(leaves, treespec)


_BY_DEFAULT: Final = TensorChunkSpec(DEFAULT_CHUNK_DIM)


def _swap(tensor: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    """Reorder samples in blocks of blocks, so that the inner blocks become the outer."""
    if not isinstance(tensor, DTensor):
        return torch.unflatten(tensor, dim, (*sizes, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    placements = [Replicate() if one.is_shard(dim) else one for one in tensor.placements]
    swapped = _swap(tensor.redistribute(placements=placements).to_local(), dim, sizes)
    gathered = DTensor.from_local(
        swapped, tensor.device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return gathered.redistribute(placements=tensor.placements)
