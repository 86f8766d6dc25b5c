"""The lowering passes by their upstream names: dicts and lists in and out, and the input stays as it is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.errors import ScheduleError
from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, RECV_B, RECV_F, REDUCE_GRAD
from penstock.ir.dependencies import NEEDS, TRANSFERS
from penstock.lowering.defer_receives import defer_receives
from penstock.lowering.merge_backward import merge_backward
from penstock.lowering.reduce_gradients import reduce_gradients
from penstock.lowering.send_receive import send_receive
from penstock.lowering.unshard_reshard import unshard_reshard
from penstock.pipelining._engine.receive_order import in_order_of_sends
from penstock.pipelining._schedule.actions import _Action
from penstock.pipelining._schedule.rows import as_lowered_rows, as_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.ir.actions import ComputationType
    from penstock.ir.edges import Edge
    from penstock.ir.schedule import Schedule
    from penstock.pipelining._schedule.rows import LoweredRow, LoweredRows


class OrderError(ScheduleError, AssertionError):
    """An order that cannot run; an ``AssertionError`` too, as upstream's is."""


def _requires_reduce_grad(action_type: ComputationType) -> bool:
    """Whether it completes the gradients of a microbatch."""
    return action_type in (BACKWARD_WEIGHT, FULL_BACKWARD)


def _add_reduce_grad(actions: Sequence[_Action | None], n_microbatches: int) -> LoweredRow:
    """Add a REDUCE_GRAD of each stage after its last backward; none if it has too few backwards."""
    done = Counter(
        leaf.stage_index
        for action in actions
        if action is not None
        for leaf in action.parts
        if _requires_reduce_grad(leaf.computation_type)
    )
    return [
        action
        for action in _one_row(actions, reduce_gradients)
        if action.computation_type is not REDUCE_GRAD or done[action.stage_index] >= n_microbatches
    ]


def _add_unshard_reshard(compute_actions: Sequence[_Action | None], max_active_stages: int = 3) -> LoweredRow:
    """Add UNSHARD before a stage is needed and RESHARD after, with at most ``max_active_stages`` unsharded at once."""
    return _one_row(compute_actions, lambda schedule: unshard_reshard(schedule, max_active_stages))


def _merge_bw(compute_actions: Sequence[_Action | None]) -> LoweredRow:
    """Merge an I and its W that are adjacent into one B."""
    return _one_row(compute_actions, merge_backward)


def _one_row(actions: Sequence[_Action | None], run: Callable[[Schedule], Schedule]) -> LoweredRow:
    """Apply a pass to a single rank's row."""
    busy = [action for action in actions if action is not None]
    if not busy:
        return []
    return as_lowered_rows(run(as_schedule({0: busy}, rank_of=lambda _: 0)), [0])[0]


def _add_send_recv(
    compute_actions: Mapping[int, Sequence[_Action | None]], stage_to_rank: Callable[[int], int], num_stages: int
) -> LoweredRows:
    """Sends and receives for what goes to another rank, in an order that cannot deadlock.

    The ranks take turns, one action a round; an idle step is a round without one.
    """
    _check_providers(compute_actions, stage_to_rank, num_stages)
    nowhere = 1 + max(
        (
            leaf.microbatch_index or 0
            for row in compute_actions.values()
            for action in row
            if action
            for leaf in action.parts
        ),
        default=0,
    )
    rows = {rank: _with_turns(row, nowhere) for rank, row in compute_actions.items()}
    lowered = with_transfers(as_schedule(rows, stage_to_rank, num_stages))
    return {
        rank: [action for action in row if action.microbatch_index != nowhere]
        for rank, row in as_lowered_rows(lowered, sorted(compute_actions)).items()
    }


def _with_turns(row: Sequence[_Action | None], microbatch: int) -> list[_Action]:
    """Replace every idle step by an action that waits for nothing: the W of a nonexistent microbatch."""
    stage = next((action.parts[0].stage_index for action in row if action is not None), None)
    if stage is None:
        return []
    idle = _Action(stage, BACKWARD_WEIGHT, microbatch)
    return [action or idle for action in row]


def with_transfers(schedule: Schedule) -> Schedule:
    """Run ``send_receive``; an order that deadlocks is an ``OrderError``."""
    try:
        return send_receive(schedule)
    except ScheduleError as error:
        raise OrderError(f"the compute actions deadlock:\n{schedule.grid()}") from error


def _check_providers(rows: Mapping[int, Sequence[_Action | None]], rank_of: Callable[[int], int], stages: int) -> None:
    """Check that what an action needs of a neighbouring stage is computed: on another rank, or earlier on its own."""
    made = {leaf for row in rows.values() for action in row if action is not None for leaf in action.parts}
    for rank, row in rows.items():
        so_far: set[tuple[object, ...]] = set()
        for step, action in enumerate(row):
            if action is None:
                continue
            for leaf in action.parts:
                stage, kind, microbatch, _ = leaf
                for need in NEEDS.get(kind, ()):
                    other = stage + need.stage_offset
                    if need.stage_offset == 0 or not 0 <= other < stages:
                        continue
                    found = so_far if rank_of(other) == rank else made
                    if not any((other, provider, microbatch, None) in found for provider in need.any_of):
                        wanted = " or ".join(f"{other}{provider}{microbatch}" for provider in need.any_of)
                        raise OrderError(
                            f"rank {rank}, step {step}: {action} needs {wanted}, which does not run before it"
                        )
            so_far.update(action.parts)


_RECEIVE_OF = {kind: transfer.receive for transfer in TRANSFERS for kind in transfer.needed_by}


def _defer_recv_ops(actions: Mapping[int, Sequence[_Action]], stage_to_rank: Callable[[int], int]) -> LoweredRows:
    """Every receive as late as may be: right before what needs it, or before a send to the same, higher rank."""
    for rank, row in actions.items():
        pending: dict[tuple[object, ...], _Action] = {}
        for action in row:
            if action.computation_type in (RECV_F, RECV_B):
                pending[action[:3]] = action
            for stage, kind, microbatch, _ in action.parts:
                pending.pop((stage, _RECEIVE_OF.get(kind), microbatch), None)
        if pending:
            left = ", ".join(map(str, pending.values()))
            raise OrderError(f"rank {rank}: no later action uses what it receives in {left}")
    return as_lowered_rows(defer_receives(as_schedule(actions, stage_to_rank)), sorted(actions))


def lowered_rows(
    rows: Mapping[int, Sequence[_Action | None]],
    rank_of: Mapping[int, int],
    stages: int,
    microbatches: int,
    *,
    defer: bool,
    edges: Sequence[Edge] | None = None,
) -> LoweredRows:
    """Run all passes of upstream over a compute-only order, in its order; deferred receives in that of sends."""
    if edges is None:
        _check_providers(rows, rank_of.__getitem__, stages)
    schedule = as_schedule(rows, rank_of.__getitem__, stages, microbatches, edges)
    schedule = with_transfers(reduce_gradients(unshard_reshard(schedule)))
    if not defer:
        return as_lowered_rows(schedule, sorted(rows))
    return in_order_of_sends(as_lowered_rows(defer_receives(schedule), sorted(rows)), rank_of)


def compute_rows_with_transfers(
    rows: Mapping[int, Sequence[_Action | None]],
    rank_of: Mapping[int, int],
    stages: int,
    edges: Sequence[Edge] | None = None,
) -> LoweredRows:
    """Add sends and receives to a compute-only order, and nothing else; a stage is where its actions are."""
    homes = {
        **rank_of,
        **{leaf.stage_index: rank for rank, row in rows.items() for action in row if action for leaf in action.parts},
    }
    busy = {rank: [action for action in row if action is not None] for rank, row in rows.items()}
    if edges is None:
        return _add_send_recv(busy, homes.__getitem__, stages)
    return as_lowered_rows(with_transfers(as_schedule(busy, homes.__getitem__, stages, edges=edges)), sorted(busy))
