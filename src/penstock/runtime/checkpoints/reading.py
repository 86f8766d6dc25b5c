"""Reads tensors out of checkpoints, for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.data_files import read_chunk
from penstock.runtime.checkpoints.encoding import decode, dtype_from, tensor_from
from penstock.runtime.checkpoints.index import Checkpoint, read_checkpoint

if TYPE_CHECKING:
    import os


class CheckpointReader(StorageReader):
    """Lets ``torch.distributed.checkpoint`` read what ``penstock.save`` has written.

    ``dcp.load(state, storage_reader=CheckpointReader("run/step-100"))`` loads any state with the names of a checkpoint,
    e.g. ``{"model": model.state_dict()}`` of the unsplit model. Nothing in the files is unpickled.

    Args:
        folder: the folder of one checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._checkpoint = read_checkpoint(Path(folder))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointReader:
        """Make a reader of a checkpoint whose index has been read."""
        reader = cls.__new__(cls)
        reader._checkpoint = checkpoint
        return reader

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Describe all tensors and values."""
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in self._checkpoint.values}
        for name, tensor in self._checkpoint.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for _, chunk in tensor.chunks.values()
            ]
            kind = TensorProperties(dtype=dtype_from(tensor.dtype))
            found[name] = TensorStorageMetadata(kind, torch.Size(tensor.shape), chunks)
        return Metadata(found)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, each chunk once."""
        wanted: dict[tuple[int, int], list[ReadItem]] = defaultdict(list)
        places = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes_of(item.storage_index.fqn))
                continue
            rank, chunk = self._find_chunk(item)
            wanted[rank, chunk.begin].append(item)
            places[rank, chunk.begin] = chunk
        for (rank, begin), items in sorted(wanted.items(), key=lambda one: one[0]):
            chunk = places[rank, begin]
            data = read_chunk(self._checkpoint.data_file(rank), chunk)
            read = tensor_from(data, dtype_from(chunk.dtype), chunk.sizes)
            for item in items:
                part = read
                for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dimension, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _find_chunk(self, item: ReadItem) -> tuple[int, Any]:
        name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        if offset not in self._checkpoint.tensors[name].chunks:
            raise CheckpointError(f"{self._checkpoint.path} has no part of {name} at {list(offset)}")
        return self._checkpoint.tensors[name].chunks[offset]

    def _bytes_of(self, name: str) -> io.BytesIO:
        """Put a value into the form in which a planner of torch takes it."""
        buffer = io.BytesIO()
        torch.save(decode(self._checkpoint.values[name]), buffer)
        buffer.seek(0)
        return buffer

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on."""
        if checkpoint_id is not None:
            self._checkpoint = read_checkpoint(Path(checkpoint_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Get ready: there is nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave a plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a folder."""
        return Path(checkpoint_id).is_dir()


def read_tensors(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors, or this rank's shards of them, by name; no other rank takes part."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = CheckpointReader.of(checkpoint)
    planner.set_up_planner(dict(tensors), reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
