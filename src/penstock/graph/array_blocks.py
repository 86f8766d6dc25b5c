"""Processes long arrays in blocks, so that temporary arrays fit into the caches and need no new memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from penstock.errors import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

#: The number of 64-bit numbers in a block.
SIZE: Final = 1 << 15
#: Positions are 32-bit numbers.
LONGEST: Final = 2**30


def check_length(length: int) -> None:
    """Refuse a schedule with more actions than can be numbered."""
    if length > LONGEST:
        raise ScheduleError(f"the schedule has {length:,} actions; at most {LONGEST:,} can be verified")


def index_dtype(length: int) -> type[np.int32 | np.int64]:
    """Return the type for positions in an array: compact for a long one, otherwise the one that NumPy indexes with."""
    return np.int64 if length <= SIZE // 8 else np.int32


def blocks(length: int) -> Sequence[slice]:
    """Return the blocks of an array of this length; an empty one has one block.

    >>> blocks(SIZE + 1)
    [slice(0, 32768, None), slice(32768, 32769, None)]
    """
    if length <= SIZE:
        return (slice(0, length),)
    return [slice(begin, min(length, begin + SIZE)) for begin in range(0, length, SIZE)]


def concatenate(parts: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    """Concatenate the results for each block; a single one is returned without a copy."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def row_blocks(offsets: Sequence[int]) -> Iterator[slice]:
    """Yield ranges of consecutive rows that fill a block, given where each row begins and the last ends.

    >>> list(row_blocks([0, 20_000, 40_000, 50_000]))
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
