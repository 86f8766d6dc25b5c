"""Short messages between ranks through the store: for what is agreed before tensors flow, or beside them."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import PenstockError, TransportError
from penstock.execution.backend_errors import is_store_timeout
from penstock.runtime.transport.bounded_store import BoundedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

#: How many seconds after the timeout of a wait the store must have answered.
_ANSWER_GRACE: Final = 1.0


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
    """Messages between pairs of ranks, and announcements that every member of a round makes to all.

    Every key is used once, and deleted when all its readers have read it.

    A wait lasts until the timeout, or until ``check`` raises because of a failure; ``check(True)`` asks the store for
    one.

    Attributes:
        awaited: what this rank waits for, so that another thread can end the wait or report it.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self.awaited: Awaited | None = None
        self._store = BoundedStore(store, timeout + _ANSWER_GRACE, f"penstock mailbox of rank {rank}")
        self._rank = rank
        self._ranks = ranks
        self._timeout = timedelta(seconds=timeout)
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._announced: Counter[str] = Counter()

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

    def announce(self, topic: str, data: bytes, members: Sequence[int], check: Callable[[bool], None]) -> Round:
        """Leave a message for all members of a topic, of which this rank is one."""
        number = self._announced[topic]
        self._announced[topic] += 1
        self._set(f"{topic}/{number}/{self._rank}", data)
        return Round(self, topic, number, members, check)

    def exchange(self, data: bytes, check: Callable[[bool], None]) -> list[bytes]:
        """Send a message to all ranks; returns those of all ranks in this round."""
        return self.announce("round", data, range(self._ranks), check).collect()

    def close(self) -> None:
        """Release the connection."""
        self._store.close()

    def _set(self, key: str, data: bytes) -> None:
        # An empty value ends a wait, so a message never is one.
        self._store.set(key, b"=" + data)

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
        return _content(data, peer)


class Round:
    """The messages that the members of a topic leave for each other, each one of its own."""

    def __init__(
        self, mailbox: Mailbox, topic: str, number: int, members: Sequence[int], check: Callable[[bool], None]
    ) -> None:
        self._mailbox = mailbox
        self._topic = topic
        self._number = number
        self._members = members
        self._check = check
        self._read: dict[int, bytes] = {}

    def known(self) -> list[bytes | None]:
        """Read the messages that are there, without waiting."""
        store = self._mailbox._store
        for member in self._members:
            if member not in self._read and store.check([key := self._key(member)]):
                self._read[member] = _content(store.get(key), member)
        return [self._read.get(member) for member in self._members]

    def collect(self) -> list[bytes]:
        """Wait for all messages."""
        for member in self._members:
            if member not in self._read:
                self._read[member] = self._mailbox._get(self._key(member), member, self._check)
        # A rank that takes part in this round has read everything of the previous one.
        if self._number > 0:
            self._mailbox._store.delete_key(f"{self._topic}/{self._number - 1}/{self._mailbox._rank}")
        return [self._read[member] for member in self._members]

    def _key(self, member: int) -> str:
        return f"{self._topic}/{self._number}/{member}"


def _content(data: bytes, peer: int) -> bytes:
    if not data.startswith(b"="):
        raise TransportError(f"the message from rank {peer} could not be decoded: {data[:60]!r}", peer=peer)
    return data[1:]
