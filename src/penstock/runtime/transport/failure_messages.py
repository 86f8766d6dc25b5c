"""A failure, put into an exception and into words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import StepError

if TYPE_CHECKING:
    from penstock.execution.transport import Progress
    from penstock.runtime.transport.protocol import Failure


def step_error(failure: Failure, *, traceback: bool = True) -> StepError:
    """What every rank raises when a step has failed; with its traceback as a note if asked for."""
    return _error(failure, failure.message, traceback)


def pipeline_failed_error(failure: Failure) -> StepError:
    """What every later call raises."""
    told = f"the pipeline has failed and must be rebuilt; what happened: {failure.message}"
    return _error(failure, told, traceback=True)


def _error(failure: Failure, message: str, traceback: bool) -> StepError:
    error = StepError(
        message,
        rank=failure.rank,
        action=failure.action,
        stage=failure.stage,
        microbatch=failure.microbatch,
        remote_traceback=failure.traceback,
    )
    if traceback and failure.traceback:
        error.add_note(f"\nOn rank {failure.rank}:\n\n{failure.traceback.rstrip()}")
    return error


def label_of(progress: Progress) -> str | None:
    """The text of the operation under way, or of what it waits for; None between steps."""
    waits = progress.waiting and progress.waits
    index, labels = progress.index, waits or progress.labels  # another thread may write them
    return labels[index] if 0 <= index < len(labels) else None


def peer_of(progress: Progress) -> int | None:
    """The rank that the operation under way waits for, or may have to, if it does not tell."""
    index, peers = progress.index, progress.peers
    return peers[index] if progress.waiting is not False and 0 <= index < len(peers) else None
