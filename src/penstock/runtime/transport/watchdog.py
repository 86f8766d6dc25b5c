"""The thread that watches over a rank: has another rank failed, does this one hang, is the store still there?"""

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

#: How often the watchdog polls, in seconds: one small request to the store each time, while a step runs.
_INTERVAL: Final = 0.25
#: It publishes the status of its rank in one of so many polls.
_PUBLISH_EVERY: Final = 4
#: After so many seconds in an operation that may have to wait, a rank does wait.
_SURELY_WAITING: Final = 1.0
#: A schedule that was proved cannot deadlock as long as all ranks run it.
_SAME_CALLS: Final = "all ranks must make the same calls (step, eval, check_parity, ...) in the same order"


class Watchdog(threading.Thread):
    """Watches over a transport while it is in use, and holds no reference to it in between."""

    def __init__(self, transport: DistributedTransport, board: StatusBoard, timeout: float) -> None:
        super().__init__(name=f"penstock watchdog of rank {transport.rank}", daemon=True)
        self._transport = weakref.ref(transport)
        self._board = board
        self._timeout = timeout
        self._stopped = threading.Event()
        self._seen = (-1, -1)
        self._since = 0.0
        self._polls = 0
        self._published = True  # so that a status is published at least once
        self._awaited: Awaited | None = None

    def run(self) -> None:
        """Poll until stopped, or until there is a failure."""
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
        """Look at the rank and the store once; returns whether to go on."""
        progress = transport.progress
        seen = progress.step, progress.index
        if seen != self._seen:
            self._seen, self._since, self._polls = seen, time.monotonic(), 0
        if progress.index < 0 and not transport.is_waiting:
            # Nothing to watch. The store may go away now: it does when the rank that hosts it is done.
            self._clear_status()
            return True
        try:
            return self._check(transport)
        except RuntimeError as error:
            if not self._stopped.is_set():
                transport.store_lost(error)
            return False

    def _clear_status(self) -> None:
        """Publish that the rank is between steps, if it last published otherwise."""
        if self._published:
            self._published = False
            with contextlib.suppress(RuntimeError):
                self._board.publish_status(RankStatus(None, None, 0.0))

    def _check(self, transport: DistributedTransport) -> bool:
        """Learn of failures, publish the status, and fail if the rank makes no progress."""
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
        waits = trace_waits(self._board, transport.rank, label, peer)
        transport.fail(Failure(transport.rank, f"{waits} (no progress for {seconds:.0f} s)", label))
        return False

    def _check_message_wait(self, transport: DistributedTransport, awaited: Awaited | None) -> bool:
        """Publish which message this rank waits for, in which call; the wait itself has its own timeout.

        It ends at once if the sender has closed its pipeline, and will never send it.
        """
        call = transport.progress.call
        if awaited != self._awaited or self._polls % _PUBLISH_EVERY == 0:
            self._awaited, self._published = awaited, awaited is not None
            if awaited is None:
                self._board.publish_status(RankStatus(None, None, 0.0))
            else:
                self._board.publish_status(RankStatus(call, awaited.peer, time.monotonic() - awaited.since))
                if self._board.has_closed(awaited.peer) and self._is_missing(transport, awaited):
                    waits = trace_waits(self._board, transport.rank, call, awaited.peer)
                    transport.fail(Failure(awaited.peer, waits))
                    return False
        self._polls += 1
        return True

    def _is_missing(self, transport: DistributedTransport, awaited: Awaited) -> bool:
        """Whether a message was not sent. One that has been read is gone, but then it is not awaited any more."""
        return not self._board.has_message(awaited.key) and transport.awaited == awaited


def trace_waits(board: StatusBoard, rank: int, label: str, peer: int) -> str:
    """Describe who waits for whom: from one rank that waits to one that does not, or round a cycle."""
    links = [WaitingRank(rank, label)]
    while peer not in [link.rank for link in links]:
        status = board.status(peer)
        if status is None or status.label is None or status.peer is None or not _is_surely_waiting(status):
            return describe_wait_chain(links, f"rank {peer}, which {_describe(status)}")
        links.append(WaitingRank(peer, status.label))
        peer = status.peer
    return f"{describe_wait_chain(links, f'rank {peer}')}; {_SAME_CALLS}"


def _is_surely_waiting(status: RankStatus) -> bool:
    return status.silent_for == 0.0 and status.seconds >= _SURELY_WAITING


def _describe(status: RankStatus | None) -> str:
    """Say what a rank does that does not wait, as a clause."""
    if status is None:
        return "has not started a step"
    if status.closed_after is not None:
        steps = "1 step" if status.closed_after == 1 else f"{status.closed_after} steps"
        return f"closed its pipeline after {steps}; all ranks must run the same number of steps"
    if status.label is None:
        return "is between steps; all ranks must run the same steps"
    if status.silent_for:
        silence = f"has not reported for {status.silent_for:.0f} s: its host or the network may be down"
        return f"was in {status.label} and {silence}"
    return f"has been in {status.label} for {status.seconds:.0f} s"
