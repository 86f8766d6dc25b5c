"""All ranks in one process, one thread each: for debuggers, notebooks and fast tests."""

from __future__ import annotations

import threading
import time
import traceback
from typing import TYPE_CHECKING, Generic, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import StepError, TransportError
from penstock.execution.channel import Progress
from penstock.graph.comm_model import CommModel
from penstock.runtime.transport.failure_messages import label_of
from penstock.runtime.transport.lanes import PostedTransfer
from penstock.runtime.transport.protocol import Failure
from penstock.runtime.transport.switchboard import Switchboard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed.distributed_c10d import Store

    from penstock.execution.channel import Pending
    from penstock.runtime.transport.switchboard import Announced

Result = TypeVar("Result")


class ThreadTransport:
    """The transport of one rank that is a thread. ``thread_transports`` creates one per rank, connected.

    A send copies its tensor when it completes: into a buffer if the model has one, else into the receiving tensor.
    When all ranks wait for each other, all of them raise at once, and the error describes the deadlock.
    """

    def __init__(self, rank: int, switchboard: Switchboard) -> None:
        self.rank = rank
        self.ranks = switchboard.ranks
        self.in_one_process = self.ranks > 1
        self.model = switchboard.model
        self.progress = Progress()
        self._switchboard = switchboard

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Check that the ranks exist; there is nothing to connect."""
        for pair in pairs:
            for rank in pair:
                self._check_peer(rank)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send of a tensor, which must not change until it is done."""
        return self._post(tensor, peer, tag, sends=True)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into a tensor."""
        return self._post(tensor, peer, tag, sends=False)

    def exchange(self, data: bytes) -> list[bytes]:
        """Share a few bytes with all ranks; returns those of every rank, in order. All ranks call it."""
        with self.progress.count_wait():
            return self._switchboard.exchange(self.rank, data, self._place)

    def announce(self, topic: str, data: bytes, members: Sequence[int]) -> _Announced:
        """Announce a few bytes to some ranks, this one among them, without waiting. All of them call it."""
        return _Announced(self._switchboard.announce(self.rank, topic, data, members), members, self)

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Send a few bytes to a peer, outside the lanes of tensors. They arrive in order."""
        self._check_peer(peer)
        self._switchboard.send_bytes(self.rank, peer, data)

    def receive_bytes(self, peer: int) -> bytes:
        """Wait for the next bytes from a peer."""
        self._check_peer(peer)
        with self.progress.count_wait():
            return self._switchboard.receive_bytes(self.rank, peer, self._place)

    def open_store(self, name: str) -> Store:
        """Open a store that all ranks share."""
        return PrefixStore(name, self._switchboard.store)

    def fail(self, failure: Failure) -> Failure:
        """Report a failure to every rank and end all waits; returns the one that was reported first."""
        return self._switchboard.fail(failure)

    def failure(self, *, max_age: float = 0.0) -> Failure | None:  # noqa: ARG002 (asking is free here)
        """Get the failure that was reported, if any."""
        return self._switchboard.failure

    def explain(self, error: BaseException) -> Failure | None:
        """Find the failure behind an error that a wait raised, if the transport or another rank caused it."""
        return self._switchboard.failure if isinstance(error, StepError) else None

    def close(self) -> None:
        """Note that this rank has finished; ranks that wait for it from now on fail."""
        self._switchboard.close(self.rank)

    @property
    def _place(self) -> str:
        """Where this rank is: in an operation of a step, or in a call."""
        return label_of(self.progress) or self.progress.call

    def _post(self, tensor: torch.Tensor, peer: int, tag: int, *, sends: bool) -> _Posted:
        self._check_peer(peer)
        transfer = PostedTransfer(self.rank, peer, tag, tensor, label_of(self.progress), sends=sends)
        self._switchboard.post(transfer)
        return _Posted(transfer, self)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.ranks:
            raise TransportError(
                f"unknown rank {peer}; there are {self.ranks} ranks (0 to {self.ranks - 1})", peer=peer
            )


class _Posted:
    """A transfer that has been posted."""

    __slots__ = ("_transfer", "_transport")

    def __init__(self, transfer: PostedTransfer, transport: ThreadTransport) -> None:
        self._transfer = transfer
        self._transport = transport

    def wait(self) -> None:
        """Return when it is done; raise if it never will be."""
        transport = self._transport
        transport._switchboard.wait_for(self._transfer, label_of(transport.progress))


class _Announced:
    """What some ranks announce to each other."""

    def __init__(self, announced: Announced, members: Sequence[int], transport: ThreadTransport) -> None:
        self._announced = announced
        self._members = members
        self._transport = transport

    def known(self) -> list[bytes | None]:
        """Get what the members have announced so far, in their order; None for one that has not."""
        return [self._announced.messages.get(member) for member in self._members]

    def collect(self) -> list[bytes]:
        """Wait for what all members announce; returns it in their order."""
        transport = self._transport
        with transport.progress.count_wait():
            return [
                transport._switchboard.await_announced(transport.rank, member, self._announced, transport._place)
                for member in self._members
            ]


def thread_transports(ranks: int, model: CommModel | None = None) -> list[ThreadTransport]:
    """Create the connected transports of some ranks, one per thread."""
    switchboard = Switchboard(ranks, model or CommModel())
    return [ThreadTransport(rank, switchboard) for rank in range(ranks)]


def run_in_threads(
    worker: Callable[[ThreadTransport], Result],
    ranks: int,
    *,
    model: CommModel | None = None,
    timeout: float | None = None,
) -> list[Result]:
    """Call ``worker(transport)`` for every rank, in one thread each; returns the results in the order of ranks.

    If one of them raises, the others stop too, and its error is raised here. No thread is left behind, unless one
    computes forever: after ``timeout`` seconds all waits end, and the error names it.

    >>> run_in_threads(lambda transport: transport.exchange(b"%d" % transport.rank), 2)
    [[b'0', b'1'], [b'0', b'1']]
    """
    runs = [_Run(worker, transport) for transport in thread_transports(ranks, model)]
    for run in runs:
        run.thread.start()
    try:
        _join(runs, timeout)
    except KeyboardInterrupt:
        runs[0].transport.fail(Failure(0, "interrupted"))
        for run in runs:
            run.thread.join(1.0)
        raise
    first = _first_error(runs)
    if first is not None:
        raise first
    return [run.result for run in runs]


class _Run(Generic[Result]):
    """One rank of a run."""

    result: Result

    def __init__(self, worker: Callable[[ThreadTransport], Result], transport: ThreadTransport) -> None:
        self.worker = worker
        self.transport = transport
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self, name=f"rank {transport.rank}", daemon=True)

    def __call__(self) -> None:
        transport = self.transport
        try:
            self.result = self.worker(transport)
        except BaseException as error:
            self.error = error
            message = f"rank {transport.rank} raised {type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            transport.fail(Failure(transport.rank, message, label_of(transport.progress), traceback=text))
        finally:
            transport.close()


def _join(runs: list[_Run[Result]], timeout: float | None) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    for run in runs:
        run.thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    late = [run.transport for run in runs if run.thread.is_alive()]
    if not late:
        return
    places = ", ".join(f"rank {one.rank} is in {label_of(one.progress) or 'its own code'}" for one in late)
    message = f"not finished within {timeout:g} s: {places}"
    late[0].fail(Failure(late[0].rank, message))
    for run in runs:
        run.thread.join(1.0)
    computing = [str(run.transport.rank) for run in runs if run.thread.is_alive()]
    left = f"; cannot stop the thread of rank {', '.join(computing)}, which is still computing" if computing else ""
    raise TransportError(message + left)


def _first_error(runs: list[_Run[Result]]) -> BaseException | None:
    """Find the error of the rank that failed first; the errors of the others only repeat it."""
    errors = {run.transport.rank: run.error for run in runs if run.error is not None}
    failure = runs[0].transport.failure() if runs else None
    if failure is None or not errors:
        return next(iter(errors.values()), None)
    return errors.get(failure.rank) or next(iter(errors.values()))
