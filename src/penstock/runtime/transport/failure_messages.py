"""A failure, put into an exception and into words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.execution.transport import Progress
    from penstock.runtime.transport.protocol import Failure

#: A longer chain of ranks tells nobody more.
MOST_LINKS: Final = 12


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


def describe_wait_chain(links: Sequence[tuple[int, str]], end: str) -> str:
    """Who waits for whom, as a sentence.

    >>> describe_wait_chain([(0, "0SEND_F1"), (1, "1RECV_F3")], "rank 0")
    'rank 0 waits in 0SEND_F1 for rank 1, which waits in 1RECV_F3 for rank 0'

    Args:
        links: the ranks that wait, each with where it does; each waits for the next.
        end: what the last of them waits for.
    """
    told = [
        f"rank {rank} waits in {place} for " if number == 0 else f"rank {rank}, which waits in {place} for "
        for number, (rank, place) in enumerate(links[:MOST_LINKS])
    ]
    skipped = f"{len(links) - MOST_LINKS} more ranks, and at last " if len(links) > MOST_LINKS else ""
    return "".join(told) + skipped + end
