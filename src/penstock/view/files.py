"""Files that pictures are written to: as a whole, of any size, with the path in every error."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import WriteError
from penstock.ir.formats import files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the name when it is complete; if that fails, what was there stays."""
    try:
        with files.replacing(path) as file:
            yield file
    except WriteError as fact:
        raise WriteError(f"{path} {fact}") from None
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None
