"""Gather the parameters of a stage before it runs and release them after: what FSDP needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.active_stages import soonest_stages
from penstock.ir import packed
from penstock.ir.actions import RESHARD, UNSHARD
from penstock.ir.numbers import whole_number
from penstock.lowering.rows import cell_ends, last_of_each_stage, ranks_of, rebuilt, without_idle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.ir.actions import ComputationType
    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule

    #: Before which place which stage is changed, by which type of action, on which rank.
    Additions = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def unshard_reshard(schedule: Schedule, max_active_stages: int = 3) -> Schedule:
    """Keep the stages that a rank runs next unsharded, so many of them; reshard what makes room, and all at the end.

    >>> from penstock.ir.schedule import Schedule
    >>> unshard_reshard(Schedule([["0F0", "1F0", "1B0", "0B0"]]), max_active_stages=1).actions[0]
    (0UNSHARD, 0F0, 0RESHARD, 1UNSHARD, 1F0, 1B0, 1RESHARD, 0UNSHARD, 0B0, 0RESHARD)
    """
    max_active_stages = whole_number("max_active_stages", max_active_stages, least=1)
    schedule = without_idle(schedule)
    places, stages, kinds, owners = _all_at_once(schedule, max_active_stages) or _rank_by_rank(
        schedule, max_active_stages
    )
    codes = packed.pack(stages, UNSHARD, None) - packed.TYPE_NUMBER[UNSHARD] + kinds
    return rebuilt(schedule, np.insert(schedule.codes, places, codes), np.insert(ranks_of(schedule), places, owners))


def _all_at_once(schedule: Schedule, limit: int) -> Additions | None:
    """If no rank has more stages than may be active: each comes at the start, and goes after its last use.

    None if some rank has more, or lets two stages go at once: then their order is a matter of its own.
    """
    codes, ranks = schedule.codes, ranks_of(schedule)
    stages = packed.stages(codes)
    places = np.arange(len(codes))
    last = last_of_each_stage(stages, places)
    first = len(codes) - 1 - last_of_each_stage(stages[::-1], places)[::-1]
    ends = cell_ends(codes, last)
    if np.bincount(ranks[first]).max(initial=0) > limit or (ends[1:] == ends[:-1]).any():
        return None
    owners = np.concatenate([ranks[last], ranks[first]])
    places = np.concatenate([ends, schedule.offsets[ranks[first]]])
    order = np.lexsort([owners, places])  # what ends a row comes before what begins the next
    kinds = np.repeat([packed.TYPE_NUMBER[RESHARD], packed.TYPE_NUMBER[UNSHARD]], [len(last), len(first)])
    return places[order], np.concatenate([stages[last], stages[first]])[order], kinds[order], owners[order]


def _rank_by_rank(schedule: Schedule, limit: int) -> Additions:
    added = [
        (schedule.offsets[rank] + place, stage, packed.TYPE_NUMBER[kind], rank)
        for rank in range(schedule.ranks)
        for place, stage, kind in _changes(schedule.codes_of(rank), limit)
    ]
    places, stages, kinds, owners = np.array(added, np.int64).reshape(-1, 4).T
    return places, stages, kinds, owners


def _changes(codes: Codes, limit: int) -> Iterator[tuple[int, int, ComputationType]]:
    """Before which place of the row which stage is unsharded or resharded, in order."""
    stages, cells = packed.stages(codes), np.cumsum(~packed.is_joined(codes)) - 1
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
