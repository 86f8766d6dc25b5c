"""The orders of the schedule classes: those of ``penstock.schedules``, with the idle steps that upstream writes."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.pipelining._schedule.actions import _Action
from penstock.pipelining._schedule.rows import as_row
from penstock.schedules.dual_pipe_v import dual_pipe_v
from penstock.schedules.looped_bfs import looped_bfs
from penstock.schedules.zbv_zero_bubble import zbv_zero_bubble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._schedule.rows import Row, Rows

# Asked for rank by rank, and made for all ranks at once.
_looped_bfs = lru_cache(maxsize=1)(looped_bfs)
_zbv_zero_bubble = lru_cache(maxsize=1)(zbv_zero_bubble)
_dual_pipe_v = lru_cache(maxsize=1)(dual_pipe_v)


def looped_bfs_row(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Row:
    """Build the order of LoopedBFS, with the wait for the first backward."""
    row = as_row(_looped_bfs(ranks, microbatches, stages_per_rank).actions[rank])
    half = len(row) // 2
    return [*[None] * rank, *row[:half], *[None] * (2 * (ranks - 1 - rank)), *row[half:]]


def zbv_row(rank: int, ranks: int, microbatches: int) -> Row:
    """Build the order of ZBVZeroBubble; its pattern needs a minimum of microbatches, and missing ones are idle."""
    row = as_row(_zbv_zero_bubble(ranks, max(2 * ranks - 1, microbatches)).actions[rank])
    real = [action if action and (action.microbatch_index or 0) < microbatches else None for action in row]
    return [*[None] * rank, *real]


def dual_pipe_v_row(rank: int, ranks: int, microbatches: int) -> Row:
    """Build the order of DualPipeV, which waits for nothing in particular."""
    return as_row(_dual_pipe_v(ranks, microbatches).actions[rank])


def _get_warmup_ops(
    rank: int,
    n_local_stages: int,
    microbatches_per_round: int,
    pp_group_size: int,
    n_microbatches: int,
    multiply_factor: int = 2,
) -> int:
    """Count the forwards that an interleaved schedule runs before its first backward."""
    whole_rounds = (n_local_stages - 1) * microbatches_per_round
    return min(whole_rounds + multiply_factor * (pp_group_size - 1 - rank), n_microbatches * n_local_stages)


def _get_1f1b_rank_ops(
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Callable[[int], int],
    backward_stage_index: Callable[[int], int],
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> Row:
    """Forwards, then a forward and a backward by turns, then backwards; idle where a rank waits for its neighbours.

    Args:
        n_local_stages: the stages of a rank.
        pp_group_size: the ranks.
        warmup_ops: how many forwards come first.
        fwd_bwd_ops: how many pairs of a forward and a backward follow.
        cooldown_ops: how many backwards come last.
        rank: whose order it is.
        forward_stage_index: the stage of a forward, by its number.
        backward_stage_index: the stage of a backward, by its number; they are counted from ``warmup_ops``.
        num_1f1b_microbatches: by how many backwards their weight gradients lag.
        enable_zero_bubble: whether backwards are split.
    """
    kind = BACKWARD_INPUT if enable_zero_bubble else FULL_BACKWARD
    total = warmup_ops + fwd_bwd_ops + cooldown_ops
    stages_back = [backward_stage_index(number) for number in range(warmup_ops, total)]
    forwards = _counted(FORWARD, map(forward_stage_index, range(warmup_ops + fwd_bwd_ops)))
    backwards = _counted(kind, stages_back)
    weights = _counted(BACKWARD_WEIGHT, stages_back)
    idle = pp_group_size - rank - 1
    if not enable_zero_bubble:
        idle = n_local_stages * pp_group_size + 2 * idle - (warmup_ops + rank)

    row: Row = [*[None] * rank, *forwards[:warmup_ops], *[None] * (idle if warmup_ops else 0)]
    for tick, backward in enumerate(backwards):
        if tick < fwd_bwd_ops:
            row.append(forwards[warmup_ops + tick])
        elif not enable_zero_bubble:
            row.append(None)
        row.append(backward)
        if enable_zero_bubble and tick >= num_1f1b_microbatches:
            row.append(weights[tick - num_1f1b_microbatches])
    if enable_zero_bubble:
        row += weights[max(0, len(backwards) - num_1f1b_microbatches) :]
    return row


def _counted(kind: ComputationType, stages: Iterable[int]) -> list[_Action]:
    """Actions of these stages, each for the next microbatch of its stage."""
    count: Counter[int] = Counter()
    actions = []
    for stage in stages:
        actions.append(_Action(stage, kind, count[stage]))
        count[stage] += 1
    return actions


def interleaved_row(
    rank: int, ranks: int, stages_per_rank: int, microbatches: int, round_size: int, *, zero_bubble: bool
) -> Row:
    """Build the order of Interleaved1F1B, or of InterleavedZeroBubble: a rank's stages take turns, a round each."""
    factor = 1 if zero_bubble else 2
    warmup = _get_warmup_ops(rank, stages_per_rank, round_size, ranks, microbatches, factor)
    each_way = stages_per_rank * microbatches

    def forward_stage(number: int) -> int:
        return number // round_size % stages_per_rank * ranks + rank

    def backward_stage(number: int) -> int:
        return (stages_per_rank - 1 - (number - warmup) // round_size % stages_per_rank) * ranks + rank

    return _get_1f1b_rank_ops(
        stages_per_rank,
        ranks,
        warmup,
        each_way - warmup,
        warmup,
        rank,
        forward_stage,
        backward_stage,
        rank if zero_bubble else 0,
        zero_bubble,
    )


def with_bubbles(rows: Rows) -> Rows:
    """Idle steps where a forward would run in the same step as the forward that it needs, or before."""
    aligned: Rows = {rank: [] for rank in rows}
    place = dict.fromkeys(rows, 0)
    seen: set[_Action] = set()
    while left := [rank for rank in rows if place[rank] < len(rows[rank])]:
        for rank in left:
            action = rows[rank][place[rank]]
            waits = (
                action is not None
                and action.computation_type is FORWARD
                and action.stage_index > 0
                and action._replace(stage_index=action.stage_index - 1) not in seen
            )
            aligned[rank].append(None if waits else action)
            place[rank] += not waits
        seen.update(action for rank in left if (action := aligned[rank][-1]) is not None)
    return aligned
