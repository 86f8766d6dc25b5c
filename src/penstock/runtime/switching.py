"""Switches a pipeline to another schedule of the same stages, on all ranks or on none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import PenstockError, StageError
from penstock.runtime.setup_checks import check_schedule, describe_schedule
from penstock.runtime.splits import add_edges

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.ir.schedule import Schedule
    from penstock.runtime.transport.protocol import Transport

_READY, _REFUSED = "ready", "refused"


def fit_schedule(schedule: Schedule, current: Schedule) -> Schedule:
    """Give a schedule the edges of the current one, or say why the stages of the pipeline cannot run it.

    Args:
        schedule: the schedule to switch to.
        current: the lowered schedule that the pipeline runs now.
    """
    check_schedule(schedule)
    ours, theirs = current.placement.rank_of, schedule.placement.rank_of
    if schedule.ranks != current.ranks or len(ours) != len(theirs):
        raise StageError(
            f"the schedule is for {_size(schedule)}, but this pipeline has {_size(current)}; make another Pipeline"
        )
    moved = next((stage for stage in range(len(ours)) if ours[stage] != theirs[stage]), None)
    if moved is not None:
        raise StageError(
            f"the schedule has stage {moved} on rank {theirs[moved]}, but this pipeline has it on rank {ours[moved]}; "
            "use a schedule with the placement of pipe.schedule, or make another Pipeline",
            stage=moved,
        )
    return add_edges(schedule, current.edges, "this pipeline")


def agree(prepare: Callable[[], Schedule], transport: Transport) -> Schedule:
    """Prepare a schedule on every rank; returns it if that succeeds everywhere with the same result. All ranks call it.

    Raises:
        StageError: another rank refuses its schedule, or has a different one. A rank that refuses its own raises its
            own error.
    """
    mistake: PenstockError | None = None
    prepared: Schedule | None = None
    try:
        prepared = prepare()
        mine = f"{_READY}\n{describe_schedule(prepared)}"
    except PenstockError as error:
        mistake, mine = error, f"{_REFUSED}\n{error}"
    except BaseException as error:  # the others must not wait for this rank
        transport.exchange(f"{_REFUSED}\n{type(error).__name__}: {error}".encode())
        raise
    answers = [data.decode(errors="replace").partition("\n") for data in transport.exchange(mine.encode())]
    if mistake is not None:
        raise mistake
    for rank, (answer, _, text) in enumerate(answers):
        if answer != _READY:
            raise StageError(f"rank {rank} cannot use the schedule it was given: {text}")
    for rank, (_, _, text) in enumerate(answers):
        if text != mine.partition("\n")[2]:
            fact = f"rank {rank} was given a different schedule from rank {transport.rank}"
            raise StageError(f"{fact}: {text[:100]!r} there, {mine.partition(chr(10))[2]!r} here")
    assert prepared is not None
    return prepared


def _size(schedule: Schedule) -> str:
    return f"{schedule.ranks} ranks and {schedule.stages} stages"
