"""The passes in order, and the proof before and after each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.errors import ScheduleError
from penstock.graph.models import CommModel
from penstock.ir.schedule import Schedule
from penstock.lowering.defer_receives import defer_receives as deferred
from penstock.lowering.merge_backward import merge_backward as merged
from penstock.lowering.reduce_gradients import reduce_gradients
from penstock.lowering.rows import without_idle
from penstock.lowering.send_receive import send_receive
from penstock.lowering.unshard_reshard import unshard_reshard
from penstock.verification.check import DEFAULT_MODEL, verify

if TYPE_CHECKING:
    from collections.abc import Callable

WITHOUT_LANES: Final = CommModel(buffering="rendezvous", lanes="message")


def lower(
    schedule: Schedule,
    *,
    merge_backward: bool = False,
    unshard: bool = True,
    max_active_stages: int = 3,
    reduce: bool = True,
    defer_receives: bool = False,
    look_ahead: int = 0,
    model: CommModel | None = None,
    verify_passes: bool = False,
) -> Schedule:
    """Add everything that a real run needs to a compute schedule; the input stays as it is.

    >>> from penstock.schedules.registry import build
    >>> print(lower(build("GPipe", ranks=2, microbatches=1), unshard=False).grid())
    step   0        1        2        3        4
    rank 0 0F0      0SEND_F0 0RECV_B0 0B0      0REDUCE_GRAD
    rank 1 1RECV_F0 1F0      1B0      1SEND_B0 1REDUCE_GRAD

    Args:
        schedule: what to lower; it has to be compute-only.
        merge_backward: make one B of an I and a W that stand together.
        unshard: add UNSHARD and RESHARD, for FSDP.
        max_active_stages: how many stages of a rank are unsharded at once.
        reduce: add REDUCE_GRAD.
        defer_receives: post each receive late, right before it is needed.
        look_ahead: with ``defer_receives``, as many uses earlier than that.
        model: how communication behaves: what the result is proved for. By default the harshest that torch.distributed
            can show; with ``defer_receives`` one without lanes, since late receives get into each other's way in them.
        verify_passes: prove the schedule before every pass too, and not only at the end.

    Raises:
        VerificationError: the schedule would not run; says everything that is wrong with it.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"a Schedule can be lowered, not {schedule!r}")
    if schedule.lowered:
        raise ScheduleError("the schedule is lowered already: it has other actions than F, B, I and W")
    passes: list[Callable[[Schedule], Schedule]] = [without_idle]
    passes += [merged] if merge_backward else []
    passes += [partial(unshard_reshard, max_active_stages=max_active_stages)] if unshard else []
    passes += [reduce_gradients] if reduce else []
    passes += [send_receive]
    passes += [partial(deferred, look_ahead=look_ahead)] if defer_receives else []
    proved_for = model or (WITHOUT_LANES if defer_receives else DEFAULT_MODEL)
    try:
        lowered = _run(passes, schedule, verify_passes=verify_passes)
        verify(lowered, model=proved_for)
    except ScheduleError:
        verify(schedule)  # it is what came in that is wrong, most likely: then this says what
        raise
    return lowered


def _run(passes: list[Callable[[Schedule], Schedule]], schedule: Schedule, *, verify_passes: bool) -> Schedule:
    for lowering in passes:
        if verify_passes:
            verify(schedule)
        schedule = lowering(schedule)
    return schedule
