"""Writes memory to a file past the cache of the system: to copy it there takes most of the processor time of a save."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: Memory, places in files and lengths must be multiples of this.
PAGE: Final = mmap.PAGESIZE
#: How much is written by one call.
_PORTION: Final = 1 << 22


def write_memory(path: Path, memory: memoryview, begin: int, end: int) -> None:
    """Write into an existing file what belongs between two of its places.

    Args:
        path: the file.
        memory: the bytes, at the beginning of a page; it ends with one.
        begin: a multiple of a page.
        end: where the file ends.
    """
    flag = getattr(os, "O_DIRECT", 0)
    try:
        _write(path, memory[: -(-(end - begin) // PAGE) * PAGE], begin, flag)
    except OSError as error:
        if not flag or error.errno != errno.EINVAL:  # which is what file systems without such writes say
            raise
        _write(path, memory[: end - begin], begin, 0)
    os.truncate(path, end)


def _write(path: Path, data: memoryview, begin: int, flag: int) -> None:
    file = os.open(path, os.O_WRONLY | flag)
    try:
        os.lseek(file, begin, os.SEEK_SET)
        write_all(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, data: memoryview) -> None:
    """Write all of it, portion by portion."""
    while data:
        data = data[os.write(file, data[:_PORTION]) :]
