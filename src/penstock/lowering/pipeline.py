"""Runs the passes in order, and verifies the result."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.errors import ScheduleError
from penstock.graph.comm_model import CommModel
from penstock.ir.schedule import Schedule
from penstock.lowering.defer_receives import defer_with_turns
from penstock.lowering.merge_backward import merge_backward
from penstock.lowering.reduce_gradients import find_reductions
from penstock.lowering.rows import insert, table_of
from penstock.lowering.send_receive import send_receive_with_turns
from penstock.lowering.unshard_reshard import find_sharding
from penstock.verification.check import DEFAULT_MODEL, verify_actions
from penstock.verification.check import verify as prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.graph.action_table import ActionTable, Positions
    from penstock.lowering.rows import Additions

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

    The result is verified, unless ``verify`` is False.

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
        verify: verify the result; what was already wrong with ``schedule`` is reported as it is there.

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
    lowered, turns = schedule, None
    try:
        for run_pass in _passes(
            merge_backwards=merge_backward,
            max_active_stages=max_active_stages if unshard else None,
            reduce=reduce,
            defer_receives=defer_receives,
            look_ahead=look_ahead,
        ):
            lowered, turns = run_pass(table_of(lowered), turns)
        if verify:
            safe_under = WITHOUT_LANES if defer_receives else DEFAULT_MODEL
            verify_actions(table_of(lowered), model=model or safe_under, turns=turns)
    except ScheduleError:
        if verify:
            prove(schedule)  # raises if the input is to blame, and reports the steps of the input
        raise
    return lowered


def _passes(
    *, merge_backwards: bool, max_active_stages: int | None, reduce: bool, defer_receives: bool, look_ahead: int | None
) -> Iterator[Pass]:
    """Yield the passes; each takes and returns, if it knows them, turns that prove the absence of deadlock."""
    if merge_backwards:
        yield _without_turns(merge_backward)
    # The gradients of a stage are reduced before it is resharded, where both happen at the same position.
    additions: list[Callable[[ActionTable], Additions]] = [find_reductions] if reduce else []
    if max_active_stages is not None:
        additions.append(partial(find_sharding, max_active_stages=max_active_stages))
    if additions:
        yield _without_turns(lambda actions: insert(actions, *[find(actions) for find in additions]))
    yield lambda actions, _: send_receive_with_turns(actions)
    if defer_receives:
        yield partial(defer_with_turns, look_ahead=look_ahead)


def _without_turns(run: Callable[[ActionTable], Schedule]) -> Pass:
    return lambda actions, _: (run(actions), None)
