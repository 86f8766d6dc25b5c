"""Puts a failure into words, and into the exception that every rank raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import StepError
from penstock.execution.backend_errors import reason_of
from penstock.runtime.transport.bounded_store import SilentStoreError
from penstock.runtime.transport.protocol import Failure

if TYPE_CHECKING:
    from penstock.execution.channel import Progress


def step_error(failure: Failure, *, traceback: bool = True) -> StepError:
    """Make what every rank raises when a step has failed; with the failing rank's traceback as a note, if asked for."""
    return _error(failure, failure.message, traceback)


def pipeline_failed_error(failure: Failure) -> StepError:
    """Make what every later call raises."""
    return _error(failure, f"the pipeline has failed and must be rebuilt; the cause: {failure.message}", traceback=True)


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


def lost_connection(rank: int, peer: int | None, label: str | None, error: BaseException) -> Failure:
    """Describe a connection of a rank that was lost without a reported failure; the peer is unknown if None."""
    connection = "a connection" if peer is None else f"the connection to rank {peer}"
    where = "" if label is None else f" in {label}"
    process = "the process at the other end" if peer is None else f"the process of rank {peer}"
    message = f"rank {rank} lost {connection}{where}; {process} may have been killed or have exited early"
    return Failure(rank if peer is None else peer, f"{message} ({reason_of(error)})", label)


def lost_store(rank: int, peer: int | None, label: str | None, error: BaseException) -> Failure:
    """Describe the loss of the store, while a rank waited for a peer, or did something else if that is None."""
    place = "" if label is None else f" in {label}" if peer is None else f" while it waits in {label} for rank {peer}"
    host = "the process that hosts it (usually rank 0, or torchrun on the first host)"
    cause = f"{host} may have been killed, or have exited after fewer steps than the others"
    if isinstance(error, SilentStoreError):
        cause = f"its host, that of rank 0, or the network to it may be down; or {host} is stopped"
    message = f"rank {rank} lost the store{place}; {cause} ({reason_of(error)})"
    return Failure(rank, message, label)


def label_of(progress: Progress) -> str | None:
    """Get the text of the current operation, or of what it waits for; None between steps."""
    waits, awaited = progress.waiting and progress.waits, progress.awaited
    if waits and awaited is not None:
        return awaited[1]
    index, labels = progress.index, waits or progress.labels  # another thread may write them
    return labels[index] if 0 <= index < len(labels) else None


def peer_of(progress: Progress) -> int | None:
    """Find the rank that the current operation waits for, or may have to wait for if that is not known."""
    index, peers, awaited = progress.index, progress.peers, progress.awaited
    if progress.waiting and awaited is not None:
        return awaited[0]
    return peers[index] if progress.waiting is not False and 0 <= index < len(peers) else None
