"""Between a file and its text: read within limits, decode, replace all at once."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from penstock.errors import FormatError, WriteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

#: Far above any real schedule, far below what would exhaust a machine.
LARGEST_FILE: Final = 1 << 26


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark."""
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise FormatError(f"is larger than {LARGEST_FILE >> 20} MiB: that is no schedule")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        row = data.count(b"\n", 0, fault.start) + 1
        raise FormatError(f"is not text: byte {fault.start} is not UTF-8", row=row) from None
    if "\0" in text:
        raise FormatError("is not text: it has a NUL", row=text.count("\n", 0, text.index("\0")) + 1)
    return text


def replace(path: Path, content: str) -> None:
    """Put the content into the file, all of it or nothing; of a size that can be read again."""
    data = content.encode()
    if len(data) > LARGEST_FILE:
        raise WriteError(f"it would be larger than {LARGEST_FILE >> 20} MiB, and could not be read again")
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside the old one, which takes its name when it is complete. A link is followed, not replaced."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise WriteError("cannot be written: Is a directory" if path.is_dir() else "is not a file that can be replaced")
    temporary = path.parent / f".penstock-{os.getpid()}-{token_hex(4)}.part"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
