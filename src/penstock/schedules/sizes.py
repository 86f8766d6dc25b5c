"""The sizes that a schedule is built for, checked once for all generators."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.errors import SizeError
from penstock.ir.numbers import whole_number

#: A schedule of so many forwards takes gigabytes; more is a slip of the keyboard.
LARGEST_SCHEDULE: Final = 10**8


class Sizes(NamedTuple):
    """What every generator is a function of."""

    ranks: int
    microbatches: int
    stages_per_rank: int


def checked_sizes(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Sizes:
    """The sizes as plain numbers; what is not a whole number from 1, or would not fit into memory, is refused."""
    fields = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    sizes = Sizes(**{field: whole_number(field, value, least=1) for field, value in fields.items()})
    if sizes.ranks * sizes.microbatches * sizes.stages_per_rank > LARGEST_SCHEDULE:
        field = max(sizes._fields, key=lambda name: int(getattr(sizes, name)))
        raise SizeError(
            f"{sizes.ranks} ranks x {sizes.stages_per_rank} stages x {sizes.microbatches} microbatches is more than "
            f"{LARGEST_SCHEDULE:,} forwards; {field}={getattr(sizes, field)} is too many",
            field=field,
            value=getattr(sizes, field),
        )
    return sizes
