"""The transport on ``torch.distributed``: point-to-point transfers, and the news of a failure through the store."""

from __future__ import annotations

import math
import re
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import PenstockError, StepError, TransportError
from penstock.execution.transport import Progress
from penstock.runtime.transport.failure_messages import label_of, peer_of, pipeline_failed_error, step_error
from penstock.runtime.transport.mailbox import Mailbox, MessageTimeoutError
from penstock.runtime.transport.process_groups import WARM_UP_TAG, PrivateGroup, backend_for
from penstock.runtime.transport.protocol import Failure
from penstock.runtime.transport.status_board import RankStatus, StatusBoard
from penstock.runtime.transport.store_connections import clone_connection, new_prefix
from penstock.runtime.transport.watchdog import Watchdog, trace_waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.runtime.transport.mailbox import Awaited
    from penstock.runtime.transport.process_groups import Post, Work

Posted = TypeVar("Posted")

#: So much later than the watch, which can say more, the backend and the mailbox give up a wait, in seconds.
_BACKEND_GRACE: Final = {"gloo": 1.0}
_UNKNOWN_GRACE: Final = 60.0  # e.g. NCCL counts from when a transfer is posted, not from when it is waited for
_MAILBOX_GRACE: Final = 1.0
#: How long a rank that is there may take to say so, and how often it looks whether it is asked.
_ROLL_CALL_GRACE: Final = 0.4
_POLL_INTERVAL: Final = 0.1
#: How long the news of a failure may take, after its effect has been seen.
_NEWS_GRACE: Final = 1.5


class DistributedTransport:
    """Moves tensors between the ranks of a process group. All of them make it together.

    It has connections of its own, so that its tags and its end touch nobody else, and a thread that watches over them:
    it ends the waits of this rank when another one has failed, when this one has waited for longer than ``timeout``
    seconds in one operation, or when the store is gone.

    Args:
        group: the process group; the default one if None. Ranks are those in the group.
        timeout: how many seconds a rank may wait for another.
        device: where the tensors are; by default on what the group is for.
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
        if parent is None or not isinstance(parent, dist.ProcessGroup):
            raise TransportError("there is no process group that this process is in: call init_process_group first")
        if timeout <= 0:
            raise TransportError(f"the timeout must be more than 0 s, not {timeout}")
        backend, device = backend_for(parent, device)
        self.rank: int = parent.rank()
        self.ranks: int = parent.size()
        self.progress = Progress()
        self._timeout = timeout
        self._device = torch.device("cpu") if backend == "gloo" else device  # of the bytes that connect sends
        self._failure: Failure | None = None
        self._asked_at = -math.inf
        self._lock = threading.Lock()
        self._connecting = self._closed = False
        with _waiting_for_all(self.rank):
            store = PrefixStore(new_prefix(parent.get_group_store(), self.rank), parent.get_group_store())
            self._mailbox = Mailbox(store, self.rank, self.ranks, timeout + _MAILBOX_GRACE)
            self._board = StatusBoard(clone_connection(store), self.rank, self.ranks)
            self._rendezvous(backend)
        self._group = self._connect(parent, PrefixStore("group", store), backend)
        self._board.announce()
        self.model = self._group.model
        self._send, self._receive = self._group.posts()
        watchdog = Watchdog(self, self._board, timeout)
        watchdog.start()
        self._end = weakref.finalize(self, _end, watchdog, self._board, self._group, self.progress)

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Bring up the given pairs of ranks in that order; name the pair that does not come up."""
        self._connecting = True
        try:
            for pair in pairs:
                if self.rank in pair and pair[0] != pair[1]:
                    self._warm_up(pair)
        finally:
            self._connecting = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a send of a contiguous tensor, which is not changed until it is done."""
        if not tensor.is_contiguous():
            # A copy would be in another order than what the other side receives into.
            raise TransportError(f"a tensor to send must be contiguous; this has strides {list(tensor.stride())}")
        return self._send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a receive into a tensor, which is contiguous and exactly as large as what is sent.

        Whoever sends has to see to that: gloo leaves the rest of a larger tensor as it was, and for a smaller one it
        ends the whole process.
        """
        return self._receive([tensor], peer, tag)

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, in the order of ranks. All ranks call it."""
        with self._store_errors():
            return self._mailbox.exchange(data, self._check)

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Hand a few bytes to a peer, outside the lanes of tensors. In order for each pair."""
        with self._store_errors():
            self._mailbox.send_bytes(peer, data)

    def receive_bytes(self, peer: int) -> bytes:
        """What the peer told next."""
        with self._store_errors():
            return self._mailbox.receive_bytes(peer, self._check)

    def fail(self, failure: Failure) -> Failure:
        """Tell every rank, and end all waits here and there. The first failure told wins; it is returned."""
        if self._failure is not None:
            return self._failure
        try:
            winning = self.record_failure(self._board.publish_failure(failure))
        except RuntimeError:  # the store is gone: the others notice that, and the end of the connections
            winning = self.record_failure(failure, alone=True)
        self._board.await_acknowledgements()
        return winning

    def failure(self, *, known: float = 0.0) -> Failure | None:
        """The failure that was told, if any.

        Asks the store, which takes as long as many an action; not if that was done less than `known` seconds ago.
        """
        if self._failure is None and not self._closed and time.monotonic() - self._asked_at >= known:
            self._asked_at = time.monotonic()
            try:
                found = self._board.failure()
            except RuntimeError as error:
                return self.store_lost(error)
            if found is not None:
                self.record_failure(found)
        return self._failure

    def explain(self, error: BaseException) -> Failure | None:
        """The failure behind an error that a wait raised, if the transport itself or another rank is the cause."""
        if isinstance(error, StepError):
            return self._failure
        if isinstance(error, TransportError):
            return self._failure or Failure(self.rank, str(error), label_of(self.progress))
        if not _is_of_a_connection(error):
            return None
        deadline = time.monotonic() + _NEWS_GRACE
        while self.failure() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._failure or self._lost_connection(error)

    def close(self) -> None:
        """End threads and connections of this transport's own; safe to call twice."""
        self._closed = True
        if self._failure is None:
            self._send = self._receive = _raising(partial(TransportError, "this transport is closed"))
        self._end()

    # For the watch --------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for another outside a step."""
        return self._connecting or self.awaited is not None

    @property
    def awaited(self) -> Awaited | None:
        """The word of another rank that this one waits for, if it does."""
        return self._mailbox.awaited

    def record_failure(self, failure: Failure, *, alone: bool = False) -> Failure:
        """Take note of a failure and end all waits; returns the one that was first.

        Args:
            failure: what happened.
            alone: whether the store, where the others would hear from this rank, is gone; that ends the waits for it.
        """
        with self._lock:
            if self._failure is not None:
                return self._failure
            self._failure = failure
        self._send = self._receive = _raising(partial(pipeline_failed_error, failure))
        self._group.end_waits()
        if not alone:
            with suppress(RuntimeError):
                self._board.acknowledge()
                awaited = self.awaited
                self._board.end_wait(None if awaited is None else awaited.key)
        return failure

    def store_lost(self, error: RuntimeError) -> Failure:
        """Take note that the store is gone."""
        told = (
            f"rank {self.rank} has lost the store: the process that hosts it, as a rule rank 0, may have been killed, "
            "or has ended because it takes fewer steps than the others"
        )
        return self.record_failure(
            Failure(self.rank, f"{told} ({_reason(error)})", label_of(self.progress)), alone=True
        )

    # Within ---------------------------------------------------------------------------------------------------------

    def _rendezvous(self, backend: str) -> None:
        """Wait until all ranks are here, with one backend, or it would wait for one without naming it.

        Who comes when another has given up waiting is told.
        """
        try:
            backends = self._mailbox.exchange(backend.encode(), lambda _: None)
        except TransportError as error:
            told = f"not all ranks make their Pipeline: {error}"
            self._board.publish_failure(Failure(self.rank, told))
            raise TransportError(told, peer=error.peer) from None
        failure = self._board.failure()
        if failure is not None:
            raise step_error(failure)
        if len(set(backends)) > 1:
            told = ", ".join(f"rank {rank} by {name.decode()}" for rank, name in enumerate(backends))
            raise TransportError(f"tensors cannot go from rank to rank: {told}; let all be on one kind of device")

    def _connect(self, parent: dist.ProcessGroup, store: PrefixStore, backend: str) -> PrivateGroup:
        """Connections of this transport's own.

        gloo tries for five times as long as it is told, and says nothing of a rank that has died meanwhile. So a thread
        waits for it, which is left to itself when time is up. Others may mind on which thread they are made.
        """
        limit = self._timeout + _BACKEND_GRACE.get(backend, _UNKNOWN_GRACE)
        make = partial(PrivateGroup, parent, store, timedelta(seconds=limit), backend)
        try:
            return self._connect_in_thread(make, limit) if backend == "gloo" else make()
        except PenstockError:
            raise
        except RuntimeError as error:
            raise self._connect_error(error) from error

    def _connect_in_thread(self, make: Callable[[], Posted], limit: float) -> Posted:
        """What another thread makes, while this one answers who is there and hears of failures."""
        made: list[Posted | BaseException] = []

        def attempt() -> None:
            try:
                made.append(make())
            except BaseException as error:  # it is raised by whoever waits
                made.append(error)

        thread = threading.Thread(target=attempt, name=f"penstock connects rank {self.rank}", daemon=True)
        thread.start()
        deadline = time.monotonic() + limit
        thread.join(_POLL_INTERVAL)
        while thread.is_alive() and time.monotonic() < deadline:
            if self._board.is_roll_called():
                self._board.announce()
                if (failure := self._board.failure()) is not None:
                    raise step_error(failure)
            thread.join(_POLL_INTERVAL)
        if not made:
            raise RuntimeError(f"not within {limit:g} s")
        if isinstance(made[0], BaseException):
            raise made[0]
        return made[0]

    def _connect_error(self, error: RuntimeError) -> TransportError:
        missing: list[int] = []
        with suppress(RuntimeError):
            self._board.announce()
            missing = self._board.unresponsive(_ROLL_CALL_GRACE)
        peer = missing[0] if len(missing) == 1 else None
        ranks = ", ".join(f"rank {rank}" for rank in missing)
        whom = f"{ranks}, which may have been killed" if missing else "its peers"
        told = f"rank {self.rank} cannot connect to {whom} ({_reason(error)})"
        with suppress(RuntimeError):
            self._board.publish_failure(Failure(self.rank, told))
        return TransportError(told, peer=peer)

    def _warm_up(self, pair: tuple[int, int]) -> None:
        """A byte each way."""
        peer = pair[1] if pair[0] == self.rank else pair[0]
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        limit = timedelta(seconds=self._timeout)
        try:
            for work in byte_each_way(self.send, self.receive, byte, self.rank, peer):
                work.wait(limit)
        except PenstockError:
            raise
        except RuntimeError as error:
            told = f"the connection between rank {pair[0]} and rank {pair[1]} does not come up"
            told += f": rank {peer} may hang, or have been killed ({_reason(error)})"
            mine = Failure(self.rank, told)
            first = self.failure() or self.fail(mine)
            if first == mine:
                raise TransportError(told, peer=peer) from error
            raise step_error(first) from error

    def _check(self, ask: bool = False) -> None:
        failure = self.failure() if ask else self._failure
        if failure is not None:
            raise pipeline_failed_error(failure)
        if self._closed:
            raise TransportError("this transport is closed")

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        self._check()
        try:
            try:
                yield
            except MessageTimeoutError as error:
                raise self._with_wait_chain(error) from None
        except PenstockError:
            raise
        except RuntimeError as error:
            raise step_error(self.store_lost(error)) from error

    def _with_wait_chain(self, error: MessageTimeoutError) -> TransportError:
        """Whoever gave no word may itself wait for another: the one at the end of the line is named, too."""
        assert error.peer is not None
        waits = trace_waits(self._board, self.rank, self.progress.call, error.peer)
        return TransportError(f"{error} ({waits})", peer=error.peer)

    def _lost_connection(self, error: BaseException) -> Failure:
        lost, awaited, label = self._group.lost_peers(), peer_of(self.progress), label_of(self.progress)
        peer = awaited if awaited in lost or not lost else lost[0]
        if peer is not None and self._is_closed(peer):
            told = trace_waits(self._board, self.rank, label or self.progress.call, peer)
            return Failure(peer, told, label)
        whose = "a connection" if peer is None else f"the connection to rank {peer}"
        where = "" if label is None else f" in {label}"
        told = (
            f"{whose} was lost{where} on rank {self.rank}; the other process may have been killed, or have ended early"
        )
        told = f"{told} ({_reason(error)})"
        return Failure(self.rank if peer is None else peer, told, label)

    def _is_closed(self, peer: int) -> bool:
        """Whether a peer has closed its pipeline, as far as the store can tell."""
        with suppress(RuntimeError):
            status = self._board.status(peer)
            return status is not None and status.is_closed
        return False


def byte_each_way(
    send: Callable[[torch.Tensor, int, int], Posted],
    receive: Callable[[torch.Tensor, int, int], Posted],
    byte: torch.Tensor,
    rank: int,
    peer: int,
) -> list[Posted]:
    """Post what brings up the connection to a peer, which posts the same."""
    # The lower rank receives first, or both could wait to send.
    if rank < peer:
        return [receive(byte.clone(), peer, WARM_UP_TAG), send(byte, peer, WARM_UP_TAG)]
    return [send(byte, peer, WARM_UP_TAG), receive(byte.clone(), peer, WARM_UP_TAG)]


def _is_of_a_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and ("/gloo/" in str(error) or "pair closure" in str(error))


def _raising(error: Callable[[], PenstockError]) -> Post:
    """What stands in place of posting, so that nothing has to be asked before each post. It holds no transport."""

    def refuse(*_: object) -> NoReturn:
        raise error()

    return refuse


def _reason(error: BaseException) -> str:
    """The first sentence of an error of torch, without the place in its sources."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0]


def _end(watchdog: Watchdog, board: StatusBoard, group: PrivateGroup, progress: Progress) -> None:
    watchdog.stop()
    with suppress(RuntimeError):  # if the store is gone, so is whoever would ask
        board.publish_status(RankStatus(None, None, 0.0, closed_after=progress.step))
    board.await_acknowledgements()
    board.close()
    group.destroy()


@contextmanager
def _waiting_for_all(rank: int) -> Iterator[None]:
    """Ranks come one by one. The one with the store may never come."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise TransportError(
            f"rank {rank} has lost the store while it waited for the other ranks to make their Pipeline: the process "
            f"that hosts it, as a rule rank 0, has ended before; see what it says itself ({_reason(error)})"
        ) from error
