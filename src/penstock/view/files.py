"""Files that appear as a whole, of any size."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import TYPE_CHECKING

from penstock.errors import WriteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the name when it is complete; if that fails, what was there stays.

    A link is followed, not replaced.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            what = "Is a directory" if target.is_dir() else "is not a file that can be replaced"
            raise WriteError(f"{path} cannot be written: {what}")
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
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None
