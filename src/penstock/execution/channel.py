"""What actions need of a transport: posting transfers, and the progress of the rank."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from penstock.graph.comm_model import CommModel


class Pending(Protocol):
    """A transfer that has been posted."""

    def wait(self) -> object:
        """Return when it is done; raise if it never will be."""


@dataclass(slots=True)
class Progress:
    """Where a rank is in its list of operations. The executor writes it, others read it.

    Attributes:
        labels: the text of every operation, in order, e.g. ``2F0``.
        peers: for every operation, the rank that it may have to wait for, or None.
        waits: for every operation, the text of what it waits for then, e.g. ``2RECV_F0``.
        step: how many steps have begun.
        index: the current operation; -1 between steps.
        waiting: whether it waits; None if unknown.
        call: what the user has called last.
        awaited: the rank and the text of what it waits for now, where it waits for several messages in turn.
        waited: for how many seconds it has waited for other ranks so far.
        received: when it had last waited for transfers, on the clock of ``time.perf_counter``.
    """

    labels: Sequence[str] = ()
    peers: Sequence[int | None] = ()
    waits: Sequence[str] = ()
    step: int = 0
    index: int = -1
    waiting: bool | None = None
    call: str = "exchange()"
    awaited: tuple[int, str] | None = None
    waited: float = 0.0
    received: float = 0.0

    def enter(self, labels: Sequence[str], peers: Sequence[int | None], waits: Sequence[str]) -> None:
        """Begin a step with these operations."""
        self.index = -1
        self.labels = labels
        self.peers = peers
        self.waits = waits
        self.waiting = False
        self.awaited = None
        self.step += 1

    def wait_for(self, transfers: Iterable[Pending]) -> None:
        """Wait for transfers. If one fails, this rank is still waiting."""
        begin = perf_counter()
        self.waiting = True
        for transfer in transfers:
            transfer.wait()
        self.waiting = False
        self.received = perf_counter()
        self.waited += self.received - begin

    @contextmanager
    def count_wait(self) -> Iterator[None]:
        """Around a wait for other ranks that is not one for transfers of a step."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.waited += perf_counter() - begin


class Channel(Protocol):
    """Moves tensors between the ranks of one pipeline."""

    model: CommModel
    progress: Progress

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send of a contiguous tensor, which must not change until it is done."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into a contiguous tensor."""
