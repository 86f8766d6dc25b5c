"""What the runtime asks of a transport, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock.execution.transport import Pending, Progress
    from penstock.graph.comm_model import CommModel


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step ended early: what every rank tells its user.

    Attributes:
        rank: where it happened.
        message: what happened, in a sentence.
        action: the text form of the action, if it happened in one.
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


class Transport(Protocol):
    """Moves tensors between the ranks of one pipeline, and the news that one of them has failed."""

    rank: int
    ranks: int
    #: Whether several ranks are threads of one process.
    in_one_process: bool
    model: CommModel
    progress: Progress

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Bring up the given pairs of ranks in that order; name the pair that does not come up."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send of a contiguous tensor, which is not changed until it is done."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into a contiguous tensor."""

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, in the order of ranks. All ranks call it."""

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Hand a few bytes to a peer, outside the lanes of tensors. In order for each pair."""

    def receive_bytes(self, peer: int) -> bytes:
        """What the peer told next."""

    def fail(self, failure: Failure) -> Failure:
        """Tell every rank, and end all waits here and there. The first failure told wins; it is returned."""

    def failure(self, *, known: float = 0.0) -> Failure | None:
        """The failure that was told, if any. What was asked less than `known` seconds ago is not asked again."""

    def explain(self, error: BaseException) -> Failure | None:
        """The failure behind an error that a wait raised, if the transport itself or another rank is the cause."""

    def close(self) -> None:
        """End threads and connections of this transport's own; safe to call twice."""
