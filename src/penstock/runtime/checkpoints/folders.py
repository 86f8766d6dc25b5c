"""Keeps checkpoints in one folder: ``step-100`` is complete; whatever else begins with ``.step-`` is left over.

A checkpoint is written into a neighbour, ``.step-100.part``, and renamed when all of it is on disk. One that it
replaces is ``.step-100.replaced`` for a moment, and still counts if the process ends in between.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.data_files import cannot_write

if TYPE_CHECKING:
    from pathlib import Path

#: The file that lists what a checkpoint consists of; it is written last.
LIST: Final = "checkpoint.json"
_COMPLETE: Final = re.compile(r"step-(\d+)")
_REPLACED: Final = re.compile(r"\.step-(\d+)\.replaced")
_LEFT_OVER: Final = re.compile(r"\.step-\d+\.(part|removed)")


def part_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder / f".step-{step}.part"


def place_of(folder: Path, step: int) -> Path:
    """Where a complete checkpoint is."""
    return folder / f"step-{step}"


def complete_steps(folder: Path) -> dict[int, Path]:
    """Find the complete checkpoints, by step in ascending order."""
    found: dict[int, Path] = {}
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return found
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror or error}", path=str(folder)) from error
    for path in paths:
        complete, replaced = _COMPLETE.fullmatch(path.name), _REPLACED.fullmatch(path.name)
        match = complete or replaced
        if match and (path / LIST).exists() and (complete or not (place_of(folder, int(match[1])) / LIST).exists()):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def begin(folder: Path, step: int) -> None:
    """Make the empty folder for a checkpoint, and clear away what saves that were killed have left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in list(folder.iterdir()):
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path)
        _end_replacements(folder)
        part_of(folder, step).mkdir()
    except OSError as error:
        raise cannot_write(folder, error) from error


def finish(folder: Path, step: int, keep: int | None) -> None:
    """Make a checkpoint whose files are on disk a complete one, and remove older ones."""
    part, place = part_of(folder, step), place_of(folder, step)
    try:
        sync_folder(part)
        old = _make_way(folder, step)
        part.rename(place)
        sync_folder(folder)
    except OSError as error:
        raise cannot_write(place, error) from error
    older = [path for number, path in complete_steps(folder).items() if number < step]
    for path in [*old, *(older[: max(0, len(older) - (keep - 1))] if keep is not None else [])]:
        try:
            _remove(path)
        except OSError as error:
            raise CheckpointError(
                f"{place} is complete, but {path} could not be removed: {error.strerror or error}", path=str(path)
            ) from error


def _make_way(folder: Path, step: int) -> list[Path]:
    """Rename the complete checkpoint of the same step, if there is one; returns where it is now."""
    place, old = place_of(folder, step), folder / f".step-{step}.replaced"
    if not place.exists():
        return []
    place.rename(old)
    return [old]


def discard(folder: Path, step: int) -> None:
    """Remove what a failed save has written, and put back what it was to replace."""
    shutil.rmtree(part_of(folder, step), ignore_errors=True)
    with suppress(OSError):
        _end_replacements(folder)


def choose(folder: Path, step: int | None) -> tuple[int, Path] | None:
    """Find the checkpoint of a step, or the latest one; None if there is none at all."""
    found = complete_steps(folder)
    if step is None:
        return next(reversed(found.items()), None)
    if step not in found:
        there = f"there are those of steps {', '.join(map(str, found))}" if found else "there is none at all"
        raise CheckpointError(f"{folder} has no complete checkpoint of step {step}; {there}", path=str(folder))
    return step, found[step]


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _end_replacements(folder: Path) -> None:
    """Put checkpoints back whose replacement has not arrived, and remove the others."""
    for old in list(folder.iterdir()):
        if match := _REPLACED.fullmatch(old.name):
            place = place_of(folder, int(match[1]))
            if (place / LIST).exists():
                _remove(old)
            else:
                old.rename(place)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that half of it is never taken for all of it."""
    gone = path.with_name(f".step-{_number(path)}.removed")
    path.rename(gone)
    shutil.rmtree(gone)


def _number(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)))
