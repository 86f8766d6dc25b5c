"""Reads and writes files: text within a size limit, JSON without duplicate keys, all or nothing when written."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import FormatError, WriteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

#: In bytes: far above any real schedule, far below what would exhaust the memory of a machine.
LARGEST_FILE: Final = 1 << 26


def read_text(path: Path) -> str:
    """Read the text of a file, without a byte order mark."""
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise FormatError(f"is larger than {LARGEST_FILE >> 20} MiB, too large to be a schedule")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        row = data.count(b"\n", 0, fault.start) + 1
        raise FormatError(f"is not text: byte {fault.start} is not UTF-8", row=row) from None
    if "\0" in text:
        raise FormatError("is not text: it contains a NUL character", row=text.count("\n", 0, text.index("\0")) + 1)
    return text


def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, for ``json.loads(object_pairs_hook=)``, in which no key may appear twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FormatError(f"duplicate key {shorten(json.dumps(key))}")
        found[key] = value
    return found


def shorten(text: str) -> str:
    """Cut a text to the 40 characters that an error message can quote."""
    return text if len(text) <= 40 else text[:37] + "..."


def write_atomically(path: str | Path, content: str) -> None:
    """Write a text file completely or not at all, and only if it is small enough to be read again.

    Raises:
        WriteError: names the file.
    """
    with write_errors(path):
        try:
            data = content.encode()
        except UnicodeEncodeError as error:
            raise WriteError(f"cannot be written: {error}") from None
        if len(data) > LARGEST_FILE:
            raise WriteError(f"would be larger than {LARGEST_FILE >> 20} MiB and could not be read again")
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file of any size that takes its name when it is complete; until then, what was there stays.

    A symbolic link is followed, not replaced.

    Raises:
        WriteError: names the file.
    """
    with write_errors(path):
        target = _replaceable(path)
        temporary = target.parent / f".penstock-{os.getpid()}-{token_hex(4)}.part"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            temporary.replace(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def _replaceable(path: str | Path) -> Path:
    try:
        target = Path(path).resolve()
    except (TypeError, ValueError) as error:  # not a path at all, or one with a NUL
        raise WriteError(f"cannot be written: {error}") from None
    if target.exists() and not target.is_file():
        raise WriteError("cannot be written: Is a directory" if target.is_dir() else "is not a regular file")
    return target


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Name the file in every error that occurs while it is written."""
    try:
        yield
    except WriteError as error:
        raise WriteError(f"{path}: {error}") from None
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from None
