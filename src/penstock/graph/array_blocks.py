"""Long arrays in blocks: what is made of a block on the way fits into the caches, and is never asked of the system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from penstock.errors import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

#: How many numbers of 64 bits make a block.
SIZE: Final = 1 << 15
#: Places are numbers of 32 bits.
LONGEST: Final = 2**30


def check_length(length: int) -> None:
    """Refuse more than can be counted here."""
    if length > LONGEST:
        raise ScheduleError(f"the schedule has {length:,} actions; at most {LONGEST:,} can be proved")


def index_dtype(length: int) -> type[np.int32 | np.int64]:
    """How to hold the places of an array of this length: in less room if they are many, else as NumPy looks them up."""
    return np.int64 if length <= SIZE // 8 else np.int32


def blocks(length: int) -> Sequence[slice]:
    """An array of this length, block by block; an empty one is one block.

    >>> blocks(SIZE + 1)
    [slice(0, 32768, None), slice(32768, 32769, None)]
    """
    if length <= SIZE:
        return (slice(0, length),)
    return [slice(begin, min(length, begin + SIZE)) for begin in range(0, length, SIZE)]


def concatenate(parts: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    """What was made of the blocks, one after the other; of one block, as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def row_blocks(offsets: Sequence[int]) -> Iterator[slice]:
    """Rows that lie one after the other, as many at once as fill a block, given where each begins and the last ends.

    >>> list(whole_rows([0, 20_000, 40_000, 50_000]))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    if offsets[-1] <= SIZE:
        yield slice(0, len(offsets) - 1)
        return
    first = 0
    for row, end in enumerate(offsets[1:]):
        if end - offsets[first] >= SIZE:
            yield slice(first, row + 1)
            first = row + 1
    if first < len(offsets) - 1:
        yield slice(first, len(offsets) - 1)
