"""The index of a checkpoint: what each rank has written, in ``rank-0.json`` and so on, and a list of these files."""

from __future__ import annotations

import json
import math
import zlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.data_files import Chunk, write_file
from penstock.runtime.checkpoints.folders import LIST
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

#: Of the files in a checkpoint. Raise it with any change that an older penstock could not read.
VERSION: Final = 1


class RankIndex(NamedTuple):
    """What a rank has written.

    Attributes:
        stages: its stages.
        replica: which replica of the pipeline it is part of, in each of the groups that hold shards or replicas.
        chunks: the tensors, or shards of them, in its data file.
        values: what is no tensor, encoded, by name.
        own: what belongs to the rank, encoded, by kind and name.
    """

    stages: list[int]
    replica: list[int]
    chunks: list[Chunk]
    values: dict[str, Any]
    own: dict[str, dict[str, Any]]

    @property
    def place(self) -> tuple[list[int], list[int]]:
        """What must be the same for a rank to go on with what was its own."""
        return self.stages, self.replica


class SavedTensor:
    """A tensor in a checkpoint.

    Attributes:
        name: its name.
        dtype: the name of its element type.
        shape: its shape.
        chunks: its parts by their offsets, each with the rank that has written it.
    """

    def __init__(self, first: Chunk) -> None:
        self.name, self.dtype, self.shape = first.name, first.dtype, tuple(first.shape)
        self.chunks: dict[tuple[int, ...], tuple[int, Chunk]] = {}

    def check(self) -> None:
        """Check that the parts are of one tensor, and all of it."""
        found = sum(math.prod(chunk.sizes) for _, chunk in self.chunks.values())
        alike = all((chunk.dtype, tuple(chunk.shape)) == (self.dtype, self.shape) for _, chunk in self.chunks.values())
        if not alike or found != math.prod(self.shape):
            raise CheckpointError(
                f"{self.name} has shape {list(self.shape)}, but its parts have {found} elements; were all ranks of all "
                "replicas saving together?"
            )


class Checkpoint:
    """The index of a complete checkpoint.

    Attributes:
        path: its folder.
        step: how many steps had been trained.
        ranks: what each rank has written.
    """

    def __init__(self, path: Path, step: int, ranks: Sequence[RankIndex]) -> None:
        self.path, self.step, self.ranks = path, step, ranks

    @cached_property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """All tensors, by name."""
        found: dict[str, SavedTensor] = {}
        for rank, index in enumerate(self.ranks):
            for chunk in index.chunks:
                tensor = found.setdefault(chunk.name, SavedTensor(chunk))
                tensor.chunks[tuple(chunk.offsets)] = rank, chunk
        for tensor in found.values():
            tensor.check()
        return found

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """What is no tensor, encoded, by name."""
        return {name: value for index in self.ranks for name, value in index.values.items()}

    def data_file(self, rank: int) -> Path:
        """The data file of a rank."""
        return data_file(self.path, rank)


def data_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its tensors."""
    return folder / f"rank-{rank}.safetensors"


def write_rank_index(folder: Path, rank: int, index: RankIndex) -> int:
    """Write what a rank has written; returns its checksum."""
    text = json.dumps(index._asdict()).encode()
    write_file(_rank_file(folder, rank), text)
    return zlib.crc32(text)


def write_list(folder: Path, step: int, checksums: Sequence[int]) -> None:
    """Write the list of what all ranks have written, which completes a checkpoint; read it back and check it first."""
    content = {
        "version": VERSION,
        "step": step,
        "penstock": __version__,
        "torch": torch.__version__,
        "ranks": list(checksums),
    }
    text = json.dumps(content | {"checksum": _checksum(content)}, indent=1).encode()
    _ = _read_ranks(folder, step, checksums).tensors
    write_file(folder / LIST, text)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the index of a complete checkpoint."""
    path = folder / LIST
    content = _read_json(path)
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path} has version {version}, but this penstock reads {VERSION}; load it with penstock "
            f"{content.get('penstock')} or later",
            path=str(path),
        )
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise _damaged(path)
    return _read_ranks(folder, content["step"], content["ranks"])


def _read_ranks(folder: Path, step: int, checksums: Sequence[int]) -> Checkpoint:
    ranks = []
    for rank, checksum in enumerate(checksums):
        fields = _read_json(_rank_file(folder, rank), checksum)
        ranks.append(RankIndex(**fields)._replace(chunks=[Chunk(*chunk) for chunk in fields["chunks"]]))
    return Checkpoint(folder, step, ranks)


def _read_json(path: Path, checksum: int | None = None) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    if checksum is not None and zlib.crc32(data) != checksum:
        raise _damaged(path)
    try:
        return json.loads(data)
    except ValueError:
        raise _damaged(path) from None


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: checksum mismatch", path=str(path))


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
