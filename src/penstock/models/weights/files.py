"""Reads safetensors: one file, or a folder with one or with several and an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.errors import FormatError, ReadError

if TYPE_CHECKING:
    import os

#: The files of a folder, as transformers names them.
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"


class WeightFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, by name; each is read when it is looked up.

    Args:
        path: a safetensors file; an index of several; or the folder of either, as ``save_pretrained`` writes it.

    Attributes:
        path: the path.
        read: the names of the tensors that were read so far, in order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.read: list[str] = []
        found = _find(self.path)
        self._files: dict[Path, Any] = {}
        self._file_of = _read_index(found) if found.suffix == ".json" else dict.fromkeys(_open(found).keys(), found)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        path = self._file_of[name]
        if path not in self._files:
            self._files[path] = _open(path)
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except Exception as error:  # the library has an error type of its own, which derives from nothing else
            raise FormatError(f"cannot read {name} from {path}: {error}") from error
        self.read.append(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._file_of  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _find(path: Path) -> Path:
    """Return the safetensors file or index that a path means."""
    if not path.is_dir():
        if not path.exists():
            raise ReadError(f"there is no file or folder {path} to read weights from")
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            raise ReadError(f"{path} is not a safetensors file; weights in other formats are not read")
        return path
    for name in (INDEX, SINGLE):  # in this order: an index says that a single file is left over
        if (path / name).exists():
            return path / name
    others = sorted(entry.name for entry in path.iterdir())
    raise ReadError(
        f"the folder {path} has neither {SINGLE} nor {INDEX}; it has {', '.join(others[:5]) or 'no files'}. Convert "
        "other formats with save_pretrained"
    )


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index lists."""
    try:
        names = json.loads(path.read_text())["weight_map"]
        files = {str(name): path.parent / file for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is not an index of safetensors files: {error!r}") from error
    if missing := sorted({file.name for file in files.values() if not file.exists()}):
        raise ReadError(f"{path} lists files that do not exist: {', '.join(missing)}")
    return files


def _open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ReadError(f"reading {path} needs safetensors: pip install 'penstock[safetensors]'") from error
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # see above
        raise FormatError(f"{path} is damaged, or not a safetensors file: {error}") from error
