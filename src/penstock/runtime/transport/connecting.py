"""Connects the ranks of a pipeline: waits until all have arrived, connects them, and names those that are missing."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import PenstockError, TransportError
from penstock.execution.backend_errors import reason_of
from penstock.runtime.transport.bounded_store import SilentStoreError
from penstock.runtime.transport.failure_messages import step_error
from penstock.runtime.transport.mailbox import Mailbox
from penstock.runtime.transport.process_groups import WARM_UP_TAG, PrivateGroup
from penstock.runtime.transport.protocol import Failure
from penstock.runtime.transport.status_board import StatusBoard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.runtime.transport.distributed import DistributedTransport

Result = TypeVar("Result")

#: How many seconds after the watchdog, which knows more, the backend and the mailbox give up a wait.
_BACKEND_GRACE: Final = {"gloo": 1.0}
_UNKNOWN_GRACE: Final = 60.0  # e.g. NCCL counts from when a transfer is posted, not from when it is waited for
_MAILBOX_GRACE: Final = 1.0
#: How many seconds a rank has to answer a roll call, and how often it looks for one.
_ROLL_CALL_GRACE: Final = 0.4
_POLL_INTERVAL: Final = 0.1
_PREFIX: Final = "penstock"


def connect_ranks(
    parent: dist.ProcessGroup, backend: str, timeout: float
) -> tuple[Store, Mailbox, StatusBoard, PrivateGroup]:
    """Wait for all ranks of a group and connect to them. All of them call it together.

    Args:
        parent: the group.
        backend: the name of the backend that moves this rank's tensors.
        timeout: how many seconds a rank may wait for another, here and later.
    """
    rank, ranks = parent.rank(), parent.size()
    with ExitStack() as opened:
        with _waiting_for_all(rank):
            parent_store = parent.get_group_store()
            store = PrefixStore(_new_prefix(parent_store, rank), parent_store)
            mailbox = Mailbox(store, rank, ranks, timeout + _MAILBOX_GRACE)
            opened.callback(mailbox.close)
            board = StatusBoard(clone_connection(store), rank, ranks, timeout)
            opened.callback(board.close)
            _rendezvous(mailbox, board, rank, backend)
        group = _connect(parent, store, board, backend, timeout)
        opened.pop_all()
    return store, mailbox, board, group


def _connect(parent: dist.ProcessGroup, store: Store, board: StatusBoard, backend: str, timeout: float) -> PrivateGroup:
    """Connect to all ranks; an error names those that are missing."""
    rank, limit = parent.rank(), timeout + _BACKEND_GRACE.get(backend, _UNKNOWN_GRACE)
    connect = partial(PrivateGroup, parent, PrefixStore("group", store), timedelta(seconds=limit), backend)
    try:
        # Other backends may depend on the thread that they are created on.
        group = _connect_in_thread(connect, board, rank, limit) if backend == "gloo" else connect()
    except PenstockError:
        raise
    except RuntimeError as error:
        raise _connect_error(board, rank, error) from None
    board.announce()
    return group


def open_mailbox(group: dist.ProcessGroup, timeout: float) -> Mailbox:
    """Open a mailbox between all processes of a group, beside those of their pipelines. All of them call it."""
    parent_store, rank = group.get_group_store(), group.rank()
    store = PrefixStore(_new_prefix(parent_store, rank), clone_connection(parent_store))
    return Mailbox(store, rank, group.size(), timeout)


def warm_up(transport: DistributedTransport, peer: int, device: torch.device, timeout: float) -> None:
    """Send a byte each way, which makes the backend connect to a peer. It calls this, too."""
    rank = transport.rank
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    try:
        for work in post_byte_each_way(transport.send, transport.receive, byte, rank, peer):
            work.wait(timedelta(seconds=timeout))
    except PenstockError:
        raise
    except RuntimeError as error:
        first, second = sorted((rank, peer))
        message = (
            f"the connection between rank {first} and rank {second} could not be established: "
            f"rank {peer} may hang or have been killed ({reason_of(error)})"
        )
        mine = Failure(rank, message)
        failure = transport.failure() or transport.fail(mine)
        if failure == mine:
            raise TransportError(message, peer=peer) from None
        raise step_error(failure) from None


def post_byte_each_way(
    send: Callable[[torch.Tensor, int, int], Result],
    receive: Callable[[torch.Tensor, int, int], Result],
    byte: torch.Tensor,
    rank: int,
    peer: int,
) -> list[Result]:
    """Post a send and a receive of a byte; the peer posts the same."""
    # The lower rank receives first, or both could wait to send.
    if rank < peer:
        return [receive(byte.clone(), peer, WARM_UP_TAG), send(byte, peer, WARM_UP_TAG)]
    return [send(byte, peer, WARM_UP_TAG), receive(byte.clone(), peer, WARM_UP_TAG)]


@contextmanager
def _waiting_for_all(rank: int) -> Iterator[None]:
    """Explain the loss of the store while ranks arrive: the one that hosts it may never do so."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, SilentStoreError) as error:
        raise TransportError(
            f"rank {rank} lost the store while waiting for the other ranks to create their Pipeline: the process that "
            f"hosts it (usually rank 0) has exited; check its output ({reason_of(error)})"
        ) from None


def _new_prefix(store: Store, rank: int) -> str:
    """Make a prefix that all ranks of a group agree on, new for each transport that they create over it.

    Every rank counts its own transports in the store; the ranks create them together.
    """
    return f"{_PREFIX}/{store.add(f'{_PREFIX}/created by {rank}', 1)}"


def clone_connection(store: Store) -> Store:
    """Open a second connection to a store, where it has connections: a wait keeps other threads from using one.

    It takes a moment: seconds, where a name server does not answer.
    """
    underlying = store
    while isinstance(underlying, PrefixStore):
        underlying = underlying.underlying_store
    # A FileStore has none; it counts its users, and a copy that goes away would take the file with it.
    if isinstance(underlying, dist.TCPStore):  # type: ignore[attr-defined]  # torch does export it
        return store.clone()  # type: ignore[attr-defined,no-any-return]  # missing from the stubs
    return store


def _rendezvous(mailbox: Mailbox, board: StatusBoard, rank: int, backend: str) -> None:
    """Wait until all ranks have arrived with the same backend; the backend itself would wait without naming a rank.

    A rank that arrives after another has given up raises that one's error.
    """
    try:
        backends = mailbox.exchange(backend.encode(), lambda _: None)
    except TransportError as error:
        message = f"not every rank has created its Pipeline: {error}"
        board.publish_failure(Failure(rank, message))
        raise TransportError(message, peer=error.peer) from None
    failure = board.failure()
    if failure is not None:
        raise step_error(failure)
    if len(set(backends)) > 1:
        found = ", ".join(f"rank {number}: {name.decode()}" for number, name in enumerate(backends))
        raise TransportError(f"ranks use different backends ({found}); put all stages on the same kind of device")


def _connect_in_thread(connect: Callable[[], Result], board: StatusBoard, rank: int, limit: float) -> Result:
    """Connect in another thread, while this one answers roll calls and watches for failures.

    gloo retries for five times as long as it is given, and does not report a rank that has died meanwhile. So its
    thread is abandoned when time is up.
    """
    results: list[Result | BaseException] = []

    def attempt() -> None:
        try:
            results.append(connect())
        except BaseException as error:  # raised below
            results.append(error)

    thread = threading.Thread(target=attempt, name=f"penstock connects rank {rank}", daemon=True)
    thread.start()
    deadline = time.monotonic() + limit
    thread.join(_POLL_INTERVAL)
    while thread.is_alive() and time.monotonic() < deadline:
        if board.is_roll_called():
            board.announce()
            if (failure := board.failure()) is not None:
                raise step_error(failure)
        thread.join(_POLL_INTERVAL)
    if not results:
        raise RuntimeError(f"not within {limit:g} s")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _connect_error(board: StatusBoard, rank: int, error: RuntimeError) -> TransportError:
    """Find out by a roll call which ranks are missing, and publish that as the failure."""
    missing: list[int] = []
    with suppress(RuntimeError):
        board.announce()
        missing = board.unresponsive(_ROLL_CALL_GRACE)
    names = ", ".join(f"rank {number}" for number in missing)
    peers = f"{names}, which may have been killed" if missing else "its peers"
    message = f"rank {rank} cannot connect to {peers} ({reason_of(error)})"
    with suppress(RuntimeError):
        board.publish_failure(Failure(rank, message))
    return TransportError(message, peer=missing[0] if len(missing) == 1 else None)
