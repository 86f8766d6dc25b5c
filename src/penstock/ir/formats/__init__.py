"""Reads and writes schedules as PyTorch's CSV, our versioned JSON, or a text grid, depending on the file suffix.

Whatever is written reads back equal, otherwise nothing is written. A file is read completely, or raises one error that
says where it is damaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import FormatError, PenstockError, ReadError, WriteError
from penstock.ir.formats import files
from penstock.ir.formats.text_grid import grid_from_schedule, schedule_from_grid
from penstock.ir.formats.torch_csv import csv_from_schedule, schedule_from_csv
from penstock.ir.formats.versioned_json import json_from_schedule, schedule_from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.ir.schedule import Schedule


class Format(NamedTuple):
    """How one kind of file is read and written."""

    parse: Callable[[str], Schedule]
    render: Callable[[Schedule], str]


FORMATS: Final[Mapping[str, Format]] = {
    ".csv": Format(schedule_from_csv, csv_from_schedule),
    ".json": Format(schedule_from_json, json_from_schedule),
    ".txt": Format(schedule_from_grid, grid_from_schedule),
}


def read(path: str | Path) -> Schedule:
    """Read a schedule from a ``.csv``, ``.json`` or ``.txt`` file.

    Raises:
        ReadError: names the file and, if possible, the row and the cell, both counted from 1.
    """
    try:
        form = FORMATS.get(Path(path).suffix.lower())
        if form is None:
            raise FormatError("is a directory; expected a file" if Path(path).is_dir() else _unknown_suffix(path))
        return form.parse(files.read_text(Path(path)))
    except ReadError as error:
        raise error.at(path=str(path)) from None
    except PenstockError as fact:
        raise FormatError(str(fact), path=str(path)) from fact
    except (OSError, ValueError, TypeError) as fault:  # a NUL in the path, or no path at all
        raise FormatError(f"cannot be read: {_reason(fault)}", path=str(path)) from None


def write(schedule: Schedule, path: str | Path, *, overwrite: bool = True) -> None:
    """Write a schedule to a ``.csv``, ``.json`` or ``.txt`` file atomically: readers see the old file or the new one.

    Args:
        schedule: the schedule.
        path: the file.
        overwrite: whether an existing file may be replaced.

    Raises:
        WriteError: the suffix is unknown, the format cannot represent the schedule, or the system call fails.
    """
    with files.write_errors(path):
        try:
            form = FORMATS.get(Path(path).suffix.lower())
        except TypeError as error:  # not a path at all
            raise WriteError(f"cannot be written: {error}") from None
        if form is None:
            raise WriteError(_unknown_suffix(path))
        if not overwrite and Path(path).exists():
            raise WriteError("already exists")
        text = form.render(schedule)
    files.write_atomically(path, text)


def _unknown_suffix(path: str | Path) -> str:
    suffix = Path(path).suffix
    *others, last = FORMATS
    found = f"unknown suffix {suffix!r}" if suffix else "the file name has no suffix"
    return f"{found}; use *{', *'.join(others)} or *{last}"


def _reason(fault: Exception) -> str:
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
