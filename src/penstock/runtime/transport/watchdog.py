"""The thread that looks after a rank: has another one failed, does this one hang, is the store there?"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from penstock.graph.wait_chain import WaitingRank, describe_wait_chain
from penstock.runtime.transport.failure_messages import label_of, peer_of
from penstock.runtime.transport.protocol import Failure
from penstock.runtime.transport.status_board import RankStatus

if TYPE_CHECKING:
    from penstock.runtime.transport.distributed import DistributedTransport
    from penstock.runtime.transport.mailbox import Awaited
    from penstock.runtime.transport.status_board import StatusBoard

#: How often the watch looks, in seconds. One small request to the store each time, while a step is under way.
_INTERVAL: Final = 0.25
#: How often it tells where its rank is.
_PUBLISH_EVERY: Final = 4
#: What is proved to run goes round only if ranks do different things, or without a proof.
_SAME_CALLS: Final = "each rank must make the same calls, step, eval, check_parity and so on, in the same order"
#: Whoever has been in an operation that may have to wait for so many seconds does wait.
_SURELY_WAITING: Final = 1.0


class Watchdog(threading.Thread):
    """Looks after a transport while it is at work, and holds no reference to it in between."""

    def __init__(self, transport: DistributedTransport, board: StatusBoard, timeout: float) -> None:
        super().__init__(name=f"penstock watch of rank {transport.rank}", daemon=True)
        self._transport = weakref.ref(transport)
        self._board = board
        self._timeout = timeout
        self._stopped = threading.Event()
        self._seen = (-1, -1)
        self._since = 0.0
        self._polls = 0
        self._published = True  # so that it is told once that this rank is there
        self._awaited: Awaited | None = None

    def run(self) -> None:
        """Look again and again, until stopped or until there is a failure."""
        while not self._stopped.wait(_INTERVAL):
            transport = self._transport()
            if transport is None or not self._poll(transport):
                return
            del transport

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(5.0)

    def _poll(self, transport: DistributedTransport) -> bool:
        """Returns whether to go on."""
        progress = transport.progress
        seen = progress.step, progress.index
        if seen != self._seen:
            self._seen, self._since, self._polls = seen, time.monotonic(), 0
        if progress.index < 0 and not transport.is_waiting:
            # Nothing to look after. The store may go away now: it does when the rank that hosts it is done.
            self._clear_status()
            return True
        try:
            return self._check(transport)
        except RuntimeError as error:
            if not self._stopped.is_set():
                transport.store_lost(error)
            return False

    def _clear_status(self) -> None:
        """The last place that was told is not where the rank is now."""
        if self._published:
            self._published = False
            with contextlib.suppress(RuntimeError):
                self._board.publish_status(RankStatus(None, None, 0.0))

    def _check(self, transport: DistributedTransport) -> bool:
        failure = self._board.failure()
        if failure is not None:
            transport.record_failure(failure)
            return False
        label, peer = label_of(transport.progress), peer_of(transport.progress)
        if label is None:
            return self._check_message_wait(transport, transport.awaited)
        seconds = time.monotonic() - self._since
        if self._polls % _PUBLISH_EVERY == 0:
            self._board.publish_status(RankStatus(label, peer, seconds))
            self._published = True
        self._polls += 1
        if peer is None or seconds < self._timeout:
            return True
        told = trace_waits(self._board, transport.rank, label, peer)
        transport.fail(Failure(transport.rank, f"{told} (no progress for {seconds:.0f} s)", label))
        return False

    def _check_message_wait(self, transport: DistributedTransport, awaited: Awaited | None) -> bool:
        """Tell whose word this rank waits for, in which call; the wait itself ends when it has taken too long.

        It ends at once if that rank is done, and will never give it.
        """
        call = transport.progress.call
        if awaited != self._awaited or self._polls % _PUBLISH_EVERY == 0:
            self._awaited, self._published = awaited, awaited is not None
            if awaited is None:
                self._board.publish_status(RankStatus(None, None, 0.0))
            else:
                self._board.publish_status(RankStatus(call, awaited.peer, time.monotonic() - awaited.since))
                status = self._board.status(awaited.peer)
                if status is not None and status.is_closed and self._message_is_missing(transport, awaited):
                    told = trace_waits(self._board, transport.rank, call, awaited.peer)
                    transport.fail(Failure(awaited.peer, told))
                    return False
        self._polls += 1
        return True

    def _message_is_missing(self, transport: DistributedTransport, awaited: Awaited) -> bool:
        """Whether a word has not been given. Once it has been read it is gone, but is not awaited any more then."""
        return not self._board.has_message(awaited.key) and transport.awaited == awaited


def trace_waits(board: StatusBoard, rank: int, label: str, peer: int) -> str:
    """Follow the ranks from one that waits, up to one that does not, or round."""
    links = [WaitingRank(rank, label)]
    while peer not in [link.rank for link in links]:
        status = board.status(peer)
        if (
            status is None
            or status.label is None
            or status.peer is None
            or status.silent_for
            or status.seconds < _SURELY_WAITING
        ):
            return describe_wait_chain(links, f"rank {peer}, {_describe(status)}")
        links.append(WaitingRank(peer, status.label))
        peer = status.peer
    return f"{describe_wait_chain(links, f'rank {peer}')}: {_SAME_CALLS}"


def _describe(status: RankStatus | None) -> str:
    if status is None:
        return "which has not begun a step"
    if status.is_closed:
        steps = "a step" if status.closed_after == 1 else f"{status.closed_after} steps"
        return f"which has closed its pipeline after {steps}: each rank must take as many"
    if status.label is None:
        return "which is between two steps: each rank must take as many, of the same kind"
    if status.silent_for:
        return f"which was in {status.label}, and has not been heard of for {status.silent_for:.0f} s"
    return f"which is in {status.label} since {status.seconds:.0f} s"
