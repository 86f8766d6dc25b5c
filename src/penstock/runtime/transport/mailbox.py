"""A few bytes from rank to rank through the store: for what is agreed before tensors flow, or beside them."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PenstockError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store


class Awaited(NamedTuple):
    """What a rank waits for.

    Attributes:
        key: under which the word will be.
        peer: whose word it is.
        since: when the wait began, on the monotonic clock.
    """

    key: str
    peer: int
    since: float


class MessageTimeoutError(TransportError):
    """A word has not come in time."""


class Mailbox:
    """Words between pairs of ranks, and rounds in which every rank gives one to all.

    Every key is used once, and deleted once it has been read by all who read it.

    A wait lasts as long as the timeout, or until ``check`` raises because there has been a failure; it is called with
    True to ask the store for it.

    Attributes:
        awaited: what this rank waits for, so that another thread can end the wait, or tell of it.
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
        """Leave a word for a peer."""
        self._set(f"message/{self._rank}/{peer}/{self._sent[peer]}", data)
        self._sent[peer] += 1

    def receive_bytes(self, peer: int, check: Callable[[bool], None]) -> bytes:
        """The next word of a peer."""
        key = f"message/{peer}/{self._rank}/{self._received[peer]}"
        data = self._get(key, peer, check)
        self._received[peer] += 1
        self._store.delete_key(key)
        return data

    def exchange(self, data: bytes, check: Callable[[bool], None]) -> list[bytes]:
        """What every rank gave in this round."""
        number = self._round
        self._round += 1
        self._set(f"round/{number}/{self._rank}", data)
        given = [
            data if rank == self._rank else self._get(f"round/{number}/{rank}", rank, check)
            for rank in range(self._ranks)
        ]
        # Whoever has given in this round has read all of the round before.
        if number > 0:
            self._store.delete_key(f"round/{number - 1}/{self._rank}")
        return given

    def _set(self, key: str, data: bytes) -> None:
        # A key without a value is what ends a wait: so a word is never empty.
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
            if isinstance(error, PenstockError) or "timeout" not in str(error).lower():
                raise
            waited = f"rank {self._rank} has waited {time.monotonic() - began:.0f} s for a word of rank {peer}"
            told = f"{waited}, which has not come: it may hang, have failed on its own, or have been killed"
            raise MessageTimeoutError(told, peer=peer) from None
        finally:
            self.awaited = None
        if not data:
            check(True)
        if not data.startswith(b"="):
            raise TransportError(f"the word of rank {peer} is damaged: {data[:60]!r}", peer=peer)
        return data[1:]
