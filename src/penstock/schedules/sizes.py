"""The sizes that a schedule is built for, checked once for all generators."""

from __future__ import annotations

from operator import index
from typing import Final

from penstock.errors import SizeError

#: One of ten million stages times microbatches already takes a gigabyte; more is a slip of the keyboard.
LARGEST_SCHEDULE: Final = 10**8


def check_sizes(*, ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
    """Refuse what is not a whole number from 1, and what would not fit into memory."""
    sizes = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for field, value in sizes.items():
        try:
            whole = index(value)
        except TypeError:
            raise SizeError(f"{field} must be a whole number, not {value!r}", field=field, value=value) from None
        if whole < 1:
            raise SizeError(f"{field} must be at least 1, not {value}", field=field, value=value)
    if ranks * microbatches * stages_per_rank > LARGEST_SCHEDULE:
        field = max(sizes, key=lambda name: sizes[name])
        raise SizeError(
            f"{ranks} ranks x {stages_per_rank} stages x {microbatches} microbatches is more than "
            f"{LARGEST_SCHEDULE:,} forwards; {field}={sizes[field]} is too many",
            field=field,
            value=sizes[field],
        )
