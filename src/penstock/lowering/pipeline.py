"""Runs the passes in order, and verifies the result of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import ScheduleError
from penstock.graph.comm_model import CommModel
from penstock.ir.actions import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
)
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.ir.schedule import Schedule
from penstock.lowering.defer_receives import defer_with_turns
from penstock.lowering.merge_backward import merge_backward
from penstock.lowering.reduce_gradients import reduce_gradients
from penstock.lowering.rows import table_of
from penstock.lowering.send_receive import send_receive_with_turns
from penstock.lowering.unshard_reshard import unshard_reshard
from penstock.verification.check import DEFAULT_MODEL, verify_change, verify_structure
from penstock.verification.check import verify as prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.graph.action_table import ActionTable, Positions
    from penstock.ir.actions import ComputationType

    Pass = Callable[[ActionTable, Positions | None], tuple[Schedule, Positions | None]]

WITHOUT_LANES: Final = CommModel(buffering="rendezvous", lanes="message")


def lower(
    schedule: Schedule,
    *,
    merge_backward: bool = False,
    unshard: bool = True,
    max_active_stages: int = 3,
    reduce: bool = True,
    defer_receives: bool = False,
    look_ahead: int | None = None,
    model: CommModel | None = None,
    verify: bool = True,
) -> Schedule:
    """Add everything that a real run needs to a compute schedule, and return the new schedule.

    The input and the result of every pass are verified, unless ``verify`` is False.

    >>> from penstock.schedules.registry import build
    >>> print(lower(build("GPipe", ranks=2, microbatches=1), unshard=False).grid())
    step   0        1        2        3        4
    rank 0 0F0      0SEND_F0 0RECV_B0 0B0      0REDUCE_GRAD
    rank 1 1RECV_F0 1F0      1B0      1SEND_B0 1REDUCE_GRAD

    Args:
        schedule: a compute-only schedule.
        merge_backward: merge an adjacent I and W into one B.
        unshard: add UNSHARD and RESHARD, for FSDP.
        max_active_stages: how many stages of a rank may be unsharded at a time.
        reduce: add REDUCE_GRAD.
        defer_receives: post each receive late, right before it is needed.
        look_ahead: with ``defer_receives``, the most receives to post ahead of the next one that is needed. By default
            as in PyTorch, which keeps two ranks from both waiting to send. (On gloo, where no message waits for
            another, a ``Pipeline`` posts receives early in any case.)
        model: how communication behaves, for the verification. By default the strictest behaviour that
            torch.distributed can show; with ``defer_receives``, one without lanes, in which late receives would block
            each other.
        verify: verify the schedule before and after every pass.

    Raises:
        VerificationError: the schedule would not run; holds everything that is wrong with it.
        ScheduleError: transfers cannot be placed because the compute actions deadlock, with ``verify=False``.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, got {schedule!r}")
    if schedule.lowered:
        raise ScheduleError("the schedule is already lowered: it contains actions other than F, B, I and W")
    if look_ahead is not None and not defer_receives:
        raise ScheduleError(f"look_ahead={look_ahead!r} only applies with defer_receives=True")
    # That the compute actions do not deadlock is proved together with their transfers, by the turns.
    actions, turns = table_of(verify_structure(schedule) if verify else schedule), None
    if merge_backward:
        actions = _merge_backwards(actions, verify=verify)
    for lowering in _lowerings(
        max_active_stages=max_active_stages if unshard else None,
        reduce=reduce,
        defer_receives=defer_receives,
        look_ahead=look_ahead,
    ):
        try:
            lowered, turns = lowering.run(actions, turns)
        except ScheduleError:
            if verify:
                prove(schedule)  # most likely a deadlock of the compute actions, which this reports
            raise
        if verify:
            actions = verify_change(actions, lowered, lowering.touched, model=model or lowering.safe_under, turns=turns)
        else:
            actions = table_of(lowered)
    return actions.schedule


class _Lowering(NamedTuple):
    """A pass that adds to the compute actions without changing them.

    Attributes:
        run: the pass; takes and returns a schedule and, if it knows them, turns that prove the absence of deadlock.
        touched: the types of actions that it adds or moves; all others must stay unchanged.
        safe_under: the strictest communication model that its result is safe under.
    """

    run: Pass
    touched: frozenset[ComputationType]
    safe_under: CommModel = DEFAULT_MODEL


def _lowerings(
    *, max_active_stages: int | None, reduce: bool, defer_receives: bool, look_ahead: int | None
) -> Iterator[_Lowering]:
    if max_active_stages is not None:
        unsharded = partial(unshard_reshard, max_active_stages=max_active_stages)
        yield _Lowering(_without_turns(unsharded), frozenset({UNSHARD, RESHARD}))
    if reduce:
        yield _Lowering(_without_turns(reduce_gradients), frozenset({REDUCE_GRAD}))
    yield _Lowering(lambda actions, _: send_receive_with_turns(actions), frozenset(TRANSFER_TYPES))
    if defer_receives:
        yield _Lowering(partial(defer_with_turns, look_ahead=look_ahead), frozenset({RECV_F, RECV_B}), WITHOUT_LANES)


def _merge_backwards(actions: ActionTable, *, verify: bool) -> ActionTable:
    merged = merge_backward(actions)
    return verify_structure(merged) if verify else table_of(merged)


def _without_turns(run: Callable[[ActionTable], Schedule]) -> Pass:
    return lambda actions, _: (run(actions), None)
