"""DualPipeV: a V in which forwards run together with backwards, so that communication overlaps with compute.

DeepSeek's DualPipe ("DeepSeek-V3 Technical Report", 2024), "cut in half" by the authors of the zero bubble schedules so
that it needs only one copy of the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.phases import expand_phases
from penstock.schedules.sizes import checked_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """Overlap forwards of one stage with backwards of the other; split the backward during warm-up and cool-down.

    >>> schedule = dual_pipe_v(ranks=2, microbatches=4)
    >>> print(schedule.grid(steps=range(9)))
    step   0   1   2   3   4   5   6   7                    8
    rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B
    rank 1 .   1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B
    >>> print(schedule.grid(steps=range(9, 16)))
    step   9                    10                   11  12  13  14  15
    rank 0 3B2                  (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
    rank 1 (2F3;1B1)OVERLAP_F_B 2B2                  1B2 2I3 1I3 2W3 1W3
    """
    ranks, microbatches, _ = checked_sizes(ranks, microbatches, 2)
    whole = max(microbatches, 2 * ranks)  # the pattern needs this many; expand_phases drops the padding
    rows = expand_phases([_phases(rank, ranks, whole) for rank in range(ranks)], microbatches)
    return Schedule.from_codes(
        rows, placement=Placement.v(ranks, 2 * ranks), microbatches=microbatches, metadata={"name": "DualPipeV"}
    )


def _phases(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    below = ranks - rank - 1
    yield "F0", 2 * below
    yield "F0 F1", rank + 1
    yield "I1 W F1", below
    both = microbatches - 2 * ranks + rank + 1
    alone = 1 if below == 0 else 0  # the last rank has just run F1, so its first overlap would wait for itself
    yield "F0 B1 F1+B0", alone
    yield "F0+B1 F1+B0", both - alone
    yield "B1 F1+B0", below
    yield "B1 B0", (rank + 1) // 2
    yield "B1 I0", (rank + 1) % 2
    yield "I1 I0", (rank + 1) // 2
    yield "W I0", below
    yield "W", rank + 1
