"""Writes safetensors in shards: every rank its own, under names that only the number of all shards decides."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Final

from penstock.errors import WriteError
from penstock.models.weights.files import INDEX, SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

_SHARD: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNITS: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str) -> int:
    """Return a number of bytes.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(1000)
    (5000000000, 1572864, 1000)
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(size))
    try:
        assert found is not None
        parsed = int(float(found[1]) * _UNITS[found[2].upper() or "B"])
    except (AssertionError, KeyError, ValueError):
        parsed = 0
    if parsed < 1:
        raise WriteError(f"{size!r} is not the size of a file; write e.g. max_shard_size='5GB'")
    return parsed


def divide(tensors: Mapping[str, torch.Tensor], most: int) -> Iterator[dict[str, torch.Tensor]]:
    """Divide tensors into shards of at most that many bytes; a larger tensor has a shard of its own.

    >>> import torch
    >>> [list(shard) for shard in divide({name: torch.ones(2) for name in "abc"}, 16)]
    [['a', 'b'], ['c']]
    """
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def write_shard(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a file, and wait until they are on the disk."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise WriteError(f"writing {path} needs safetensors: pip install 'penstock[safetensors]'") from error
    try:
        # The format allows neither views nor shared memory.
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
        _flush(path)
    except Exception as error:  # the library has an error type of its own, which derives from nothing else
        raise WriteError(f"cannot write {path}: {error}") from error


def place_shards(shards: Sequence[tuple[Path, Mapping[str, int]]], folder: Path) -> None:
    """Give written shards their places in a folder, beside an index if there are several.

    What an earlier export left there is replaced. The index goes last, so that it lists complete files only.

    Args:
        shards: the file of each shard, on the same disk as the folder, and the sizes of its tensors.
        folder: where they go.
    """
    count = len(shards)
    names = (
        [SINGLE] if count == 1 else [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    )
    (folder / INDEX).unlink(missing_ok=True)
    for (path, _), name in zip(shards, names, strict=True):
        path.replace(folder / name)
    for old in folder.iterdir():
        if old.name not in names and (old.name == SINGLE or _SHARD.fullmatch(old.name)):
            old.unlink()
    if count > 1:
        weight_map = {tensor: name for (_, sizes), name in zip(shards, names, strict=True) for tensor in sizes}
        total = sum(sum(sizes.values()) for _, sizes in shards)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        part = folder / f"{INDEX}.part"
        part.write_text(text + "\n")
        _flush(part)
        part.replace(folder / INDEX)
    _flush(folder)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
