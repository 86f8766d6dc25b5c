"""Gather the parameters of a stage before it runs and release them after: what FSDP needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.active_stages import soonest_stages
from penstock.ir import packed
from penstock.ir.actions import RESHARD, UNSHARD
from penstock.ir.numbers import whole_number
from penstock.lowering.rows import cell_ends, inserted, last_of_each_stage, taken_apart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.action_table import Leaves, Places
    from penstock.ir.actions import ComputationType
    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule

    #: Before which places which actions come, on which ranks.
    Additions = tuple[Places, Codes, Places]


def unshard_reshard(schedule: Schedule | Leaves, max_active_stages: int = 3) -> Schedule:
    """Keep the stages that a rank runs next unsharded, so many of them; reshard what makes room, and all at the end.

    >>> from penstock.ir.schedule import Schedule
    >>> unshard_reshard(Schedule([["0F0", "1F0", "1B0", "0B0"]]), max_active_stages=1).actions[0]
    (0UNSHARD, 0F0, 0RESHARD, 1UNSHARD, 1F0, 1B0, 1RESHARD, 0UNSHARD, 0B0, 0RESHARD)
    """
    max_active_stages = whole_number("max_active_stages", max_active_stages, least=1)
    leaves = taken_apart(schedule)
    return inserted(leaves, *(_all_at_once(leaves, max_active_stages) or _rank_by_rank(leaves, max_active_stages)))


def _all_at_once(leaves: Leaves, limit: int) -> Additions | None:
    """If no rank has more stages than may be active: each comes at the start, and goes after its last use.

    None if some rank has more, or lets two stages go at once: then their order is a matter of its own.
    """
    places = np.arange(len(leaves))
    last, first = last_of_each_stage(leaves, places), last_of_each_stage(leaves, places[::-1])
    ends = cell_ends(leaves, last)
    if np.bincount(leaves.rank[first]).max(initial=0) > limit or (ends[1:] == ends[:-1]).any():
        return None
    ranks = np.concatenate([leaves.rank[last], leaves.rank[first]])
    places = np.concatenate([ends, leaves.schedule.offsets[leaves.rank[first]]])
    codes = [packed.pack(leaves.stage[last], RESHARD, None), packed.pack(leaves.stage[first], UNSHARD, None)]
    order = np.lexsort([ranks, places])  # what ends a row comes before what begins the next
    return places[order], np.concatenate(codes)[order], ranks[order]


def _rank_by_rank(leaves: Leaves, limit: int) -> Additions:
    schedule = leaves.schedule
    added = [
        (schedule.offsets[rank] + place, packed.pack(stage, kind, None), rank)
        for rank in range(schedule.ranks)
        for place, stage, kind in _changes(schedule.codes_of(rank), limit)
    ]
    places, codes, ranks = np.array(added, np.int64).reshape(-1, 3).T
    return places, codes, ranks


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
