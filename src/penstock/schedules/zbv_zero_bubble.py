"""ZB-V: the zero bubble of ZB-H2 with the memory of 1F1B, with two stages per rank placed in a V.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6. There are no bubbles only at equal costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.phases import expand_phases
from penstock.schedules.sizes import checked_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator


def zbv_zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """Run down the V and up again; the last stage is on rank 0, so rank 0 also begins the backward.

    >>> print(zbv_zero_bubble(ranks=2, microbatches=3).grid())
    step   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
    rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1 .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches, 2)
    whole = max(microbatches, 2 * ranks - 1)  # the pattern needs this many; expand_phases drops the padding
    rows = expand_phases([_phases(rank, ranks, whole) for rank in range(ranks)], microbatches)
    return Schedule.from_codes(
        rows,
        placement=Placement.v(ranks, 2 * ranks),
        microbatches=microbatches,
        metadata={"name": "ZBVZeroBubble"},
    )


def _phases(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    below = ranks - rank
    yield "F0", 2 * below - 1
    yield "F1 F0", rank
    yield "F1 I1 W1", below
    yield "F0 I0 W0 F1 I1 W1", microbatches - (2 * ranks - 1) + rank
    yield "I0 W0 F1 I1 W1", below - 1
    yield "I0 I1", rank
    yield "I0 W0", below
    yield "W1", rank
    yield "W0", rank
