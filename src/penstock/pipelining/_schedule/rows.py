"""Orders as dicts from rank to actions, to schedules and back: the only place where one becomes the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import packed
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.pipelining._schedule.actions import _Action, _PeerAction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.ir.actions import Action
    from penstock.ir.edges import Edge

#: What a rank does, with None for idle steps.
Row: TypeAlias = "list[_Action | None]"
Rows: TypeAlias = "dict[int, Row]"
#: The same after lowering.
LoweredRow: TypeAlias = "list[_Action]"
LoweredRows: TypeAlias = "dict[int, LoweredRow]"


def as_schedule(
    rows: Mapping[int, Sequence[_Action | None]],
    rank_of: Callable[[int], int] | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    edges: Sequence[Edge] | None = None,
) -> Schedule:
    """Make a schedule of these rows; the ranks may have any numbers, in any order.

    Args:
        rows: what each rank does.
        rank_of: the rank of a stage; by default the one that has its actions.
        stages: how many stages there are; by default up to the last that has an action.
        microbatches: how many there are; by default up to the last that has an action.
        edges: which values go from which stage to which others; those of a chain by default.

    Raises:
        ScheduleError: an action is invalid, or a stage is on two ranks, or on none.
    """
    ranks = sorted(rows)
    codes = [packed.pack_cells(rows[rank]) for rank in ranks]
    every = np.concatenate(codes) if codes else np.empty(0, np.int64)
    offsets = np.cumsum([0, *map(len, codes)])
    if len(every) and not packed.is_wellformed(every, offsets):
        raise ScheduleError(f"invalid action: {_first_malformed(rows)}; write e.g. _Action(2, F, 0)")
    placement = None
    if rank_of is not None:
        place = {rank: number for number, rank in enumerate(ranks)}
        count = packed.largest(every)[0] + 1 if stages is None else stages
        homes = [rank_of(stage) for stage in range(count)]
        placement = Placement(tuple(place[home] for home in homes), len(ranks))
    return Schedule.from_codes(codes, placement=placement, microbatches=microbatches, edges=edges)


def _first_malformed(rows: Mapping[int, Sequence[_Action | None]]) -> str:
    for rank in sorted(rows):
        for step, action in enumerate(rows[rank]):
            codes = packed.pack_cells([action])
            if not packed.is_wellformed(codes, np.array([0, len(codes)])):
                return f"{action!r}, rank {rank}, step {step}"
    return "an overlap"


def as_row(actions: Sequence[Action | None]) -> Row:
    """Convert a row of a schedule to upstream's form."""
    return [None if action is None else as_action(action) for action in actions]


def as_rows(schedule: Schedule, ranks: Sequence[int] | None = None) -> Rows:
    """Convert the rows of a schedule; under these ranks, if they have other numbers."""
    rows = schedule.actions
    return {rank: as_row(rows[number]) for number, rank in enumerate(ranks or range(schedule.ranks))}


def as_lowered_rows(schedule: Schedule, ranks: Sequence[int]) -> LoweredRows:
    """Convert the rows of a schedule, without idle steps."""
    rows = as_rows(schedule, ranks)
    return {rank: [action for action in row if action is not None] for rank, row in rows.items()}


def as_action(action: Action) -> _Action:
    """An action of a schedule as upstream has it; a transfer beyond the chain names its peer."""
    if action.peer_index is not None:
        return _PeerAction(*action[:3], action.peer_index)
    stage, kind, microbatch, parts = action
    return _Action(stage, kind, microbatch, None if parts is None else tuple(map(as_action, parts)))
