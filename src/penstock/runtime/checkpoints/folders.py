"""Keeps checkpoints in one folder: ``step-100`` is complete; whatever else begins with ``.step-`` is left over.

A checkpoint is written into a neighbour, ``.step-100.part``, and renamed when all of it is on disk. One that it
replaces is ``.step-100.replaced`` for a moment, and still counts if the process ends in between.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Final

from penstock.errors import CheckpointError

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
    if not folder.exists():
        return found
    for path in sorted(folder.iterdir()):
        complete, replaced = _COMPLETE.fullmatch(path.name), _REPLACED.fullmatch(path.name)
        match = complete or replaced
        if match and (path / LIST).exists() and (complete or not (place_of(folder, int(match[1])) / LIST).exists()):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def begin(folder: Path, step: int) -> None:
    """Make the empty folder for a checkpoint, and clear away what saves that were killed have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path)
        elif match := _REPLACED.fullmatch(path.name):
            _end_replacement(path, place_of(folder, int(match[1])))
    part_of(folder, step).mkdir()


def finish(folder: Path, step: int, keep: int | None) -> None:
    """Make a checkpoint whose files are on disk a complete one, and remove older ones."""
    part, place = part_of(folder, step), place_of(folder, step)
    sync_folder(part)
    old = folder / f".step-{step}.replaced"
    if place.exists():
        place.rename(old)
    part.rename(place)
    sync_folder(folder)
    if old.exists():
        shutil.rmtree(old)
    if keep is not None:
        older = [path for number, path in complete_steps(folder).items() if number < step]
        for path in older[: max(0, len(older) - (keep - 1))]:
            _remove(path)


def discard(folder: Path, step: int) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(part_of(folder, step), ignore_errors=True)


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


def _end_replacement(old: Path, place: Path) -> None:
    if place.exists():
        shutil.rmtree(old)
    else:
        old.rename(place)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that half of it is never taken for all of it."""
    gone = path.with_name(f".{path.name}.removed")
    path.rename(gone)
    shutil.rmtree(gone)
