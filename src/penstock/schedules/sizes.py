"""Checks the sizes that a schedule is built for, once for all generators."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.errors import SizeError
from penstock.ir.numbers import whole_number

#: A schedule with this many forwards takes gigabytes; more is probably a typo.
LARGEST_SCHEDULE: Final = 10**8


class Sizes(NamedTuple):
    """The arguments of every generator."""

    ranks: int
    microbatches: int
    stages_per_rank: int


def checked_sizes(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Sizes:
    """Return the sizes as ``int``; refuse what is not a positive integer, or would not fit into memory."""
    fields = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    sizes = Sizes(**{field: whole_number(field, value, least=1) for field, value in fields.items()})
    if sizes.ranks * sizes.microbatches * sizes.stages_per_rank > LARGEST_SCHEDULE:
        field = max(sizes._fields, key=lambda name: int(getattr(sizes, name)))
        raise SizeError(
            f"{sizes.ranks} ranks x {sizes.stages_per_rank} stages x {sizes.microbatches} microbatches is more than "
            f"{LARGEST_SCHEDULE:,} forwards; reduce {field}={getattr(sizes, field)}",
            field=field,
            value=getattr(sizes, field),
        )
    return sizes
