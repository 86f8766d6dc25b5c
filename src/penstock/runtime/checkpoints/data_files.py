"""Writes and reads the tensors of a rank: one file in the format of safetensors, which needs no pickle.

The file has a header, in JSON, and then the elements of the tensors. A shard has its offset in its name: ``w@0,128``.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.direct_writes import PAGE, write_all, write_memory
from penstock.runtime.checkpoints.encoding import bytes_of, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: After how many bytes the thread offers its core to others.
_PORTION: Final = 1 << 20
_give_way: Final = getattr(os, "sched_yield", lambda: None)


class Piece(NamedTuple):
    """A tensor to save, or this rank's shard of one.

    Attributes:
        name: its name in the checkpoint.
        shape: that of the whole tensor.
        offsets: where the shard begins in it.
        tensor: the elements of the shard.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """The name in the file."""
        if tuple(self.tensor.shape) == self.shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offsets))}"


class Chunk(NamedTuple):
    """Where a piece is in a file.

    Attributes:
        name: the name of the tensor.
        dtype: the name of its element type.
        shape: that of the whole tensor.
        offsets: where the piece begins in it.
        sizes: the shape of the piece.
        begin: the byte in the file where it begins.
        end: the byte behind it.
        checksum: the CRC-32 of its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int
    checksum: int


def in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort pieces as they are in a file: large elements first, so that all of them are aligned."""
    return sorted(pieces, key=lambda piece: (-piece.tensor.element_size(), piece.key))


def write_pieces(path: Path, pieces: Sequence[Piece], memory: memoryview | None = None) -> list[Chunk]:
    """Write sorted pieces to a file; returns when they are on disk.

    Args:
        path: the file.
        pieces: what to write.
        memory: where they are, one behind the other, if they are so: then the disk reads them from there.
    """
    header = _header(pieces)
    at, chunks = len(header), []
    try:
        with path.open("wb", buffering=0) as file:
            write_all(file.fileno(), memoryview(header))
            for piece in pieces:
                data = bytes_of(piece.tensor, piece.name)
                checksum = 0
                for begin in range(0, len(data), _PORTION):
                    checksum = zlib.crc32(data[begin:][:_PORTION], checksum)
                    if memory is None:
                        write_all(file.fileno(), data[begin:][:_PORTION])
                    # Even a thread of the lowest priority keeps a core for milliseconds after another one needs it.
                    _give_way()
                name, sizes = dtype_name(piece.tensor.dtype), tuple(piece.tensor.shape)
                chunks.append(Chunk(piece.name, name, piece.shape, piece.offsets, sizes, at, at + len(data), checksum))
                at += len(data)
            if memory is not None:
                write_memory(path, memory, len(header), at)
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error
    return chunks


def write_file(path: Path, data: bytes) -> None:
    """Write a file; returns when it is on disk."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Explain why a checkpoint cannot be written."""
    why = error.strerror or str(error)
    if error.errno == errno.ENOENT:
        why += " (every rank must see the same folder)"
    return CheckpointError(f"cannot write {path}: {why}; earlier checkpoints are as they were", path=str(path))


def read_chunk(path: Path, chunk: Chunk) -> bytearray:
    """Read the bytes of a piece, and check them."""
    data = bytearray(chunk.end - chunk.begin)
    try:
        with path.open("rb") as file:
            file.seek(chunk.begin)
            count = file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    if count < len(data):
        raise CheckpointError(f"{path} is truncated: {chunk.name} should end at byte {chunk.end}", path=str(path))
    if zlib.crc32(data) != chunk.checksum:
        raise CheckpointError(f"{path} is damaged: checksum mismatch in {chunk.name}", path=str(path))
    return data


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, object] = {}
    at = 0
    for piece in pieces:
        kind = piece.tensor.dtype
        if kind not in _TYPES:
            raise CheckpointError(f"{piece.name} has the element type {dtype_name(kind)}, which cannot be saved")
        end = at + piece.tensor.numel() * piece.tensor.element_size()
        entries[piece.key] = {"dtype": _TYPES[kind], "shape": list(piece.tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % PAGE)  # what follows begins with a page, as disks like it
    return len(text).to_bytes(8, "little") + text
