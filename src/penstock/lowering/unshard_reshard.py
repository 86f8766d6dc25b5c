"""Gather the parameters of a stage before it runs and release them after: what FSDP needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import SizeError
from penstock.graph.active_stages import first_and_last_uses, soonest_stages
from penstock.ir import packed
from penstock.ir.actions import RESHARD, UNSHARD
from penstock.lowering.rows import ranks_of, rebuilt, without_idle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule


def unshard_reshard(schedule: Schedule, max_active_stages: int = 3) -> Schedule:
    """Keep the stages that a rank runs next unsharded, so many of them; reshard what makes room, and all at the end.

    >>> from penstock.ir.schedule import Schedule
    >>> unshard_reshard(Schedule([["0F0", "1F0", "1B0", "0B0"]]), max_active_stages=1).actions[0]
    (0UNSHARD, 0F0, 0RESHARD, 1UNSHARD, 1F0, 1B0, 1RESHARD, 0UNSHARD, 0B0, 0RESHARD)
    """
    if max_active_stages < 1:
        raise SizeError(
            f"max_active_stages must be at least 1, not {max_active_stages}",
            field="max_active_stages",
            value=max_active_stages,
        )
    schedule = without_idle(schedule)
    places, added, owners = [], [], []
    for rank in range(schedule.ranks):
        offset = schedule.offsets[rank]
        for place, stage, kind in _changes(schedule.codes_of(rank), max_active_stages):
            places.append(offset + place)
            added.append((stage, packed.TYPE_NUMBER[kind]))
            owners.append(rank)
    stages, kinds = np.array(added, np.int64).reshape(-1, 2).T
    codes = packed.pack(stages, UNSHARD, None) - packed.TYPE_NUMBER[UNSHARD] + kinds
    return rebuilt(schedule, np.insert(schedule.codes, places, codes), np.insert(ranks_of(schedule), places, owners))


def _changes(codes: Codes, limit: int) -> Iterator[tuple[int, int, object]]:
    """Before which place of the row which stage is unsharded or resharded, in order."""
    stages, cells = packed.stages(codes), np.cumsum(~packed.is_joined(codes)) - 1
    if len(np.unique(stages)) <= limit:
        leaving, entering = first_and_last_uses(stages, cells)
    else:
        leaving, entering = soonest_stages(stages, cells, limit)
    # Several stages that go at once go in the order of a set, which is how upstream remembers the active ones.
    active: set[int] = set()
    for place in sorted({*leaving, *entering}):
        gone = set(leaving.get(place, ()))
        for stage in [stage for stage in active if stage in gone]:
            active.remove(stage)
            yield place, stage, RESHARD
        for stage in entering.get(place, ()):
            active.add(stage)
            yield place, stage, UNSHARD
    for stage in list(active):
        yield len(codes), stage, RESHARD
