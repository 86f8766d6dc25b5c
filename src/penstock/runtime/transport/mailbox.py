"""A few bytes from rank to rank through the store: for what is agreed before tensors flow, or beside them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store


class Mailbox:
    """Words between pairs of ranks, and rounds in which every rank gives one to all.

    Every key is used once, and deleted once it has been read by all who read it.

    Attributes:
        awaited: the key that this rank waits for, so that another thread can end the wait.
    """

    def __init__(self, store: Store, rank: int, ranks: int, check: Callable[[bool], None]) -> None:
        """Make one.

        Args:
            store: where the words are left; whoever waits on it does so for as long as its timeout.
            rank: the rank that reads and writes.
            ranks: how many there are.
            check: raises if there has been a failure; with True it asks the store whether there has.
        """
        self.awaited: str | None = None
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._check = check
        self._told: Counter[int] = Counter()
        self._heard: Counter[int] = Counter()
        self._round = 0

    def tell(self, peer: int, data: bytes) -> None:
        """Leave a word for a peer."""
        self._set(f"word/{self._rank}/{peer}/{self._told[peer]}", data)
        self._told[peer] += 1

    def hear(self, peer: int) -> bytes:
        """The next word of a peer."""
        key = f"word/{peer}/{self._rank}/{self._heard[peer]}"
        data = self._get(key, peer)
        self._heard[peer] += 1
        self._store.delete_key(key)
        return data

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave in this round."""
        number = self._round
        self._round += 1
        self._set(f"round/{number}/{self._rank}", data)
        given = [
            data if rank == self._rank else self._get(f"round/{number}/{rank}", rank) for rank in range(self._ranks)
        ]
        # Whoever has given in this round has read all of the round before.
        if number > 0:
            self._store.delete_key(f"round/{number - 1}/{self._rank}")
        return given

    def end_wait(self, store: Store) -> None:
        """End the wait of this rank, from another thread and through another connection."""
        key = self.awaited
        if key is not None:
            store.set(key, "")

    def _set(self, key: str, data: bytes) -> None:
        # A key without a value is what ends a wait: so a word is never empty.
        self._store.set(key, b"=" + data)  # type: ignore[arg-type]  # bytes are fine

    def _get(self, key: str, peer: int) -> bytes:
        began = time.monotonic()
        self.awaited = key
        try:
            self._check(False)  # from now on, a failure ends the wait
            data = self._store.get(key)
        except RuntimeError as error:
            self._check(False)
            if isinstance(error, PenstockError) or "timeout" not in str(error).lower():
                raise
            waited = f"rank {self._rank} has waited {time.monotonic() - began:.0f} s"
            raise TransportError(f"{waited} for a word of rank {peer}, which has not come", peer=peer) from error
        finally:
            self.awaited = None
        if not data:
            self._check(True)
        if not data.startswith(b"="):
            raise TransportError(f"the word of rank {peer} is damaged: {data[:60]!r}", peer=peer)
        return data[1:]
