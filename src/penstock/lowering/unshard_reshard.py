"""Adds UNSHARD before a stage runs and RESHARD after it, for FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.active_stages import active_stage_changes
from penstock.ir import packed
from penstock.ir.actions import RESHARD, UNSHARD
from penstock.ir.numbers import whole_number
from penstock.lowering.rows import Additions, cell_ends, insert, last_of_each_stage, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.action_table import ActionTable
    from penstock.ir.actions import ComputationType
    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule


def unshard_reshard(schedule: Schedule | ActionTable, max_active_stages: int = 3) -> Schedule:
    """Keep the next stages of a rank unsharded, at most ``max_active_stages``; reshard others, and all at the end.

    >>> from penstock.ir.schedule import Schedule
    >>> unshard_reshard(Schedule([["0F0", "1F0", "1B0", "0B0"]]), max_active_stages=1).actions[0]
    (0UNSHARD, 0F0, 0RESHARD, 1UNSHARD, 1F0, 1B0, 1RESHARD, 0UNSHARD, 0B0, 0RESHARD)
    """
    actions = table_of(schedule)
    return insert(actions, find_sharding(actions, max_active_stages))


def find_sharding(actions: ActionTable, max_active_stages: int) -> Additions:
    """Find where every UNSHARD and RESHARD belongs."""
    limit = whole_number("max_active_stages", max_active_stages, least=1)
    return _all_at_once(actions, limit) or _rank_by_rank(actions, limit)


def _all_at_once(actions: ActionTable, limit: int) -> Additions | None:
    """Unshard every stage at the start and reshard it after its last use, if no rank has more stages than the limit.

    Return None if some rank has more, or reshards two stages at once, whose order takes more work.
    """
    positions = np.arange(len(actions))
    last, first = last_of_each_stage(actions, positions), last_of_each_stage(actions, positions[::-1])
    ends, ranks = cell_ends(actions, last), actions.rank[first]
    if np.bincount(ranks).max(initial=0) > limit or (ends[1:] == ends[:-1]).any():
        return None
    # The end of a row comes before the beginning of the next.
    codes = [packed.pack(actions.stages_at(which), kind, None) for which, kind in ((last, RESHARD), (first, UNSHARD))]
    return Additions(
        np.concatenate([ends, actions.schedule.offsets[ranks]]),
        np.concatenate(codes),
        np.concatenate([actions.rank[last], ranks]),
    )


def _rank_by_rank(actions: ActionTable, limit: int) -> Additions:
    schedule = actions.schedule
    added = [
        (schedule.offsets[rank] + position, packed.pack(stage, kind, None), rank)
        for rank in range(schedule.ranks)
        for position, stage, kind in _changes(schedule.codes_of(rank), limit)
    ]
    return Additions(*np.array(added, np.int64).reshape(-1, 3).T)


def _changes(codes: Codes, limit: int) -> Iterator[tuple[int, int, ComputationType]]:
    """Yield which stage is unsharded or resharded, and before which position of the row, in order."""
    stages, cells = packed.stages(codes), np.cumsum(~packed.is_joined(codes)) - 1
    leaving, entering = active_stage_changes(stages, cells, limit)
    # Stages that leave together are resharded in the order of a set, because upstream keeps active stages in one.
    active: set[int] = set()
    for position in sorted({*leaving, *entering}):
        gone = set(leaving.get(position, ()))
        for stage in [stage for stage in active if stage in gone]:
            active.remove(stage)
            yield position, stage, RESHARD
        for stage in entering.get(position, ()):
            active.add(stage)
            yield position, stage, UNSHARD
    for stage in list(active):
        yield len(codes), stage, RESHARD
