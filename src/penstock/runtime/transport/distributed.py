"""The transport on ``torch.distributed``: transfers between two ranks, and reports of failures through the store."""

from __future__ import annotations

import math
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import PenstockError, StepError, TransportError
from penstock.execution.backend_errors import is_connection_error
from penstock.execution.channel import Progress
from penstock.runtime.transport.connecting import clone_connection, connect_ranks, warm_up
from penstock.runtime.transport.failure_messages import (
    label_of,
    lost_connection,
    lost_store,
    peer_of,
    pipeline_failed_error,
    step_error,
)
from penstock.runtime.transport.mailbox import MessageTimeoutError
from penstock.runtime.transport.process_groups import PrivateGroup, backend_for, refuse_with
from penstock.runtime.transport.protocol import Failure
from penstock.runtime.transport.status_board import RankStatus, StatusBoard
from penstock.runtime.transport.watchdog import Watchdog, trace_waits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.distributed_c10d import Store

    from penstock.runtime.transport.mailbox import Awaited, Mailbox, Round
    from penstock.runtime.transport.process_groups import Work

#: How many seconds the report of a failure may take to arrive after its effect.
_REPORT_GRACE: Final = 1.5


class DistributedTransport:
    """Moves tensors between the ranks of a process group. All of them create it together.

    It has its own connections, so that neither its tags nor closing it affect anyone else, and a thread that watches
    over them: it ends the waits of this rank when another rank fails, when this one has waited for longer than
    ``timeout`` seconds in one operation, or when the store is lost.

    Args:
        group: the process group; the default one if None. Ranks are those in the group.
        timeout: how many seconds a rank may wait for another.
        device: where the tensors are; by default the device that the group is for.
    """

    in_one_process = False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        device: torch.device | None = None,
    ) -> None:
        parent = group if group is not None else dist.group.WORLD
        if parent is None:
            raise TransportError("no process group is initialized; call torch.distributed.init_process_group() first")
        if not isinstance(parent, dist.ProcessGroup):  # what torch returns to ranks outside a new group
            raise TransportError("this process is not a member of the given group; create a Pipeline on members only")
        if timeout <= 0:
            raise TransportError(f"timeout must be more than 0 s, got {timeout}")
        backend, device = backend_for(parent, device)
        self.rank: int = parent.rank()
        self.ranks: int = parent.size()
        self.progress = Progress()
        self._timeout = timeout
        self._warm_up_device = torch.device("cpu") if backend == "gloo" else device
        self._failure: Failure | None = None
        self._asked_at = -math.inf
        self._lock = threading.Lock()
        self._connecting = self._closed = False
        self._store, self._mailbox, self._board, self._group = connect_ranks(parent, backend, timeout)
        self.model = self._group.model
        self._send, self._receive = self._group.posts()
        watchdog = Watchdog(self, self._board, timeout)
        watchdog.start()
        self._end = weakref.finalize(self, _end, watchdog, self._mailbox, self._board, self._group, self.progress)

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect the given pairs of ranks in that order; an error names the pair that fails."""
        self._connecting = True
        try:
            for first, second in pairs:
                if first != second and self.rank in (first, second):
                    peer = second if first == self.rank else first
                    warm_up(self, peer, self._warm_up_device, self._timeout)
        finally:
            self._connecting = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a send of a contiguous tensor, which must not change until it is done."""
        if not tensor.is_contiguous():
            # A copy would have another order of elements than what the other side receives into.
            raise TransportError(f"a tensor to send must be contiguous; this one has strides {list(tensor.stride())}")
        return self._send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a receive into a tensor, which is contiguous and exactly as large as what is sent.

        The caller must ensure that: gloo leaves the rest of a larger tensor as it was, and ends the whole process for a
        smaller one.
        """
        return self._receive([tensor], peer, tag)

    def exchange(self, data: bytes) -> list[bytes]:
        """Share a few bytes with all ranks; returns those of every rank, in order. All ranks call it."""
        with self._store_errors(), self.progress.count_wait():
            return self._mailbox.exchange(data, self._check_wait)

    def announce(self, topic: str, data: bytes, members: Sequence[int]) -> Announced:
        """Announce a few bytes to some ranks, this one among them, without waiting. All of them call it."""
        with self._store_errors():
            return Announced(self, self._mailbox.announce(topic, data, members, self._check_wait))

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Send a few bytes to a peer, outside the lanes of tensors. They arrive in order."""
        with self._store_errors():
            self._mailbox.send_bytes(peer, data)

    def receive_bytes(self, peer: int) -> bytes:
        """Wait for the next bytes from a peer."""
        with self._store_errors(), self.progress.count_wait():
            return self._mailbox.receive_bytes(peer, self._check_wait)

    def open_store(self, name: str) -> Store:
        """Open a store that all ranks share, over a connection of its own; it outlives this transport."""
        with self._store_errors():
            return PrefixStore(name, clone_connection(self._store))

    def fail(self, failure: Failure) -> Failure:
        """Report a failure to every rank and end all waits; returns the one that was reported first."""
        if self._failure is not None:
            return self._failure
        try:
            first = self.record_failure(self._board.publish_failure(failure))
        except RuntimeError:  # the store is lost: the others notice that, and that their connections are closed
            first = self.record_failure(failure, store_is_lost=True)
        self._board.await_acknowledgements()
        return first

    def failure(self, *, max_age: float = 0.0) -> Failure | None:
        """Get the failure that was reported, if any.

        Asks the store, which takes as long as a small action, unless it did so less than `max_age` seconds ago.
        """
        if self._failure is None and not self._closed and time.monotonic() - self._asked_at >= max_age:
            self._asked_at = time.monotonic()
            try:
                found = self._board.failure()
            except RuntimeError as error:
                return self.store_lost(error)
            if found is not None:
                self.record_failure(found)
        return self._failure

    def explain(self, error: BaseException) -> Failure | None:
        """Find the failure behind an error that a wait raised, if the transport or another rank caused it."""
        if isinstance(error, StepError):
            return self._failure
        if isinstance(error, TransportError):
            return self._failure or Failure(self.rank, str(error), label_of(self.progress))
        if not is_connection_error(error):
            return None
        deadline = time.monotonic() + _REPORT_GRACE
        while self.failure() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._failure or self._lost_connection(error)

    def close(self) -> None:
        """End the threads and connections of this transport; safe to call twice."""
        self._closed = True
        if self._failure is None:
            self._send = self._receive = refuse_with(partial(TransportError, "this transport is closed"))
        self._end()

    # For the watchdog -----------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for another one outside a step."""
        return self._connecting or self.awaited is not None

    @property
    def awaited(self) -> Awaited | None:
        """The bytes from another rank that this one waits for, if it does."""
        return self._mailbox.awaited

    def record_failure(self, failure: Failure, *, store_is_lost: bool = False) -> Failure:
        """Note a failure and end all waits; returns the one that was noted first.

        Args:
            failure: what happened.
            store_is_lost: whether the store is lost, so that there is nothing to acknowledge, and waits for it end.
        """
        with self._lock:
            if self._failure is not None:
                return self._failure
            self._failure = failure
        self._send = self._receive = refuse_with(partial(pipeline_failed_error, failure))
        self._group.end_waits()
        if not store_is_lost:
            with suppress(RuntimeError):
                self._board.acknowledge()
                awaited = self.awaited
                self._board.end_wait(None if awaited is None else awaited.key)
        return failure

    def store_lost(self, error: RuntimeError) -> Failure:
        """Note that the store is lost."""
        failure = lost_store(self.rank, peer_of(self.progress), label_of(self.progress), error)
        return self.record_failure(failure, store_is_lost=True)

    # Internal -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse a call after a failure."""
        if self._failure is not None:
            raise pipeline_failed_error(self._failure)
        if self._closed:
            raise TransportError("this transport is closed")

    def _check_wait(self, ask: bool) -> None:
        """End a wait because of a failure: the error names the cause."""
        failure = self.failure() if ask else self._failure
        if failure is not None:
            raise step_error(failure)
        if self._closed:
            raise TransportError("this transport is closed")

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Explain errors of the mailbox, and refuse to use it after a failure."""
        self._check()
        try:
            try:
                yield
            except MessageTimeoutError as error:
                raise self._with_wait_chain(error) from None
        except PenstockError:
            raise
        except RuntimeError as error:
            raise step_error(self.store_lost(error)) from None

    def _with_wait_chain(self, error: MessageTimeoutError) -> TransportError:
        """Add what the peer itself waits for: the rank at the end of the chain is the one to look at."""
        assert error.peer is not None
        waits = trace_waits(self._board, self.rank, self.progress.call, error.peer)
        return TransportError(f"{error} ({waits})", peer=error.peer)

    def _lost_connection(self, error: BaseException) -> Failure:
        """Find out which connection was lost, when no rank has reported a failure."""
        lost, awaited, label = self._group.lost_peers(), peer_of(self.progress), label_of(self.progress)
        peer = awaited if awaited in lost or not lost else lost[0]
        with suppress(RuntimeError):
            if peer is not None and self._board.has_closed(peer):
                return Failure(peer, trace_waits(self._board, self.rank, label or self.progress.call, peer), label)
        return lost_connection(self.rank, peer, label, error)


class Announced:
    """What some ranks announce to each other."""

    def __init__(self, transport: DistributedTransport, messages: Round) -> None:
        self._transport = transport
        self._messages = messages

    def known(self) -> list[bytes | None]:
        """Get what the members have announced so far, in their order; None for one that has not."""
        with self._transport._store_errors():
            return self._messages.known()

    def collect(self) -> list[bytes]:
        """Wait for what all members announce; returns it in their order."""
        with self._transport._store_errors(), self._transport.progress.count_wait():
            return self._messages.collect()


def _end(watchdog: Watchdog, mailbox: Mailbox, board: StatusBoard, group: PrivateGroup, progress: Progress) -> None:
    watchdog.stop()
    mailbox.close()
    with suppress(RuntimeError):  # a lost store cannot be asked
        board.publish_status(RankStatus(None, None, 0.0, closed_after=progress.step))
    board.await_acknowledgements()
    board.close()
    group.destroy()
