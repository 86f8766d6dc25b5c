"""What the runtime requires of a transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.distributed_c10d import Store

    from penstock.execution.channel import Pending, Progress
    from penstock.graph.comm_model import CommModel


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step ended early, as every rank reports it.

    Attributes:
        rank: where it happened.
        message: what happened, in a sentence.
        action: the text of the action, if it happened in one.
        stage: its stage.
        microbatch: its microbatch.
        traceback: the traceback on that rank, as text.
    """

    rank: int
    message: str
    action: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    traceback: str | None = None


class Announcement(Protocol):
    """What some ranks announce to each other, without waiting; collect it before the next one of its topic."""

    def known(self) -> list[bytes | None]:
        """Get what the members have announced so far, in their order; None for one that has not."""

    def collect(self) -> list[bytes]:
        """Wait for what all members announce; returns it in their order."""


class Transport(Protocol):
    """Moves tensors between the ranks of one pipeline, and reports the failure of one to all."""

    rank: int
    ranks: int
    #: Whether several ranks are threads of one process.
    in_one_process: bool
    model: CommModel
    progress: Progress

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect the given pairs of ranks in that order; an error names the pair that fails."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send of a contiguous tensor, which must not change until it is done."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into a contiguous tensor."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Share a few bytes with all ranks; returns those of every rank, in order. All ranks call it."""

    def announce(self, topic: str, data: bytes, members: Sequence[int]) -> Announcement:
        """Announce a few bytes to some ranks, this one among them, without waiting. All of them call it."""

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Send a few bytes to a peer, outside the lanes of tensors. They arrive in order."""

    def receive_bytes(self, peer: int) -> bytes:
        """Wait for the next bytes from a peer."""

    def open_store(self, name: str) -> Store:
        """Open a store that all ranks share, over a connection of its own. All of them call it with the same name."""

    def fail(self, failure: Failure) -> Failure:
        """Report a failure to every rank and end all waits; returns the one that was reported first."""

    def failure(self, *, max_age: float = 0.0) -> Failure | None:
        """Get the failure that was reported, if any, as known at most `max_age` seconds ago."""

    def explain(self, error: BaseException) -> Failure | None:
        """Find the failure behind an error that a wait raised, if the transport or another rank caused it."""

    def close(self) -> None:
        """End the threads and connections of this transport; safe to call twice."""
