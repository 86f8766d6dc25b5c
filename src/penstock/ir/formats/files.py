"""Between a file and its text: read within limits, decode, replace all at once."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.errors import FormatError

#: Far above any real schedule, far below what would exhaust a machine.
LARGEST_FILE: Final = 1 << 27


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
    """Put the content into a new file beside the old one, then give it the name."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
