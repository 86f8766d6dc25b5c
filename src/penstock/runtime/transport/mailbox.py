"""Short messages between ranks through the store: for what is agreed before tensors flow, or beside them."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PenstockError, TransportError
from penstock.execution.backend_errors import is_store_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store


class Awaited(NamedTuple):
    """The message that a rank waits for.

    Attributes:
        key: its key in the store.
        peer: the rank that sends it.
        since: when the wait began, on the monotonic clock.
    """

    key: str
    peer: int
    since: float


class MessageTimeoutError(TransportError):
    """A message did not arrive in time."""


class Mailbox:
    """Messages between pairs of ranks, and rounds in which every rank sends one to all.

    Every key is used once, and deleted when all its readers have read it.

    A wait lasts until the timeout, or until ``check`` raises because of a failure; ``check(True)`` asks the store for
    one.

    Attributes:
        awaited: what this rank waits for, so that another thread can end the wait or report it.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self.awaited: Awaited | None = None
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout = timedelta(seconds=timeout)
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._round = 0

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Leave a message for a peer."""
        self._set(f"message/{self._rank}/{peer}/{self._sent[peer]}", data)
        self._sent[peer] += 1

    def receive_bytes(self, peer: int, check: Callable[[bool], None]) -> bytes:
        """Wait for the next message from a peer."""
        key = f"message/{peer}/{self._rank}/{self._received[peer]}"
        data = self._get(key, peer, check)
        self._received[peer] += 1
        self._store.delete_key(key)
        return data

    def exchange(self, data: bytes, check: Callable[[bool], None]) -> list[bytes]:
        """Send a message to all ranks; returns those of all ranks in this round."""
        number = self._round
        self._round += 1
        self._set(f"round/{number}/{self._rank}", data)
        messages = [
            data if rank == self._rank else self._get(f"round/{number}/{rank}", rank, check)
            for rank in range(self._ranks)
        ]
        # A rank that takes part in this round has read everything of the previous one.
        if number > 0:
            self._store.delete_key(f"round/{number - 1}/{self._rank}")
        return messages

    def _set(self, key: str, data: bytes) -> None:
        # An empty value ends a wait, so a message never is one.
        self._store.set(key, b"=" + data)  # type: ignore[arg-type]  # bytes are fine

    def _get(self, key: str, peer: int, check: Callable[[bool], None]) -> bytes:
        began = time.monotonic()
        self.awaited = Awaited(key, peer, began)
        try:
            check(False)  # from now on, a failure ends the wait
            self._store.wait([key], self._timeout)
            data = self._store.get(key)
        except RuntimeError as error:
            check(False)
            if isinstance(error, PenstockError) or not is_store_timeout(error):
                raise
            raise MessageTimeoutError(
                f"rank {self._rank} waited {time.monotonic() - began:.0f} s for a message from rank {peer}; "
                f"rank {peer} may hang, have failed, or have been killed",
                peer=peer,
            ) from None
        finally:
            self.awaited = None
        if not data:
            check(True)
        if not data.startswith(b"="):
            raise TransportError(f"the message from rank {peer} could not be decoded: {data[:60]!r}", peer=peer)
        return data[1:]
