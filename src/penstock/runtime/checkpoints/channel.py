"""Connects the ranks that save and load together: what fails on one of them is an error on all.

Unlike a failure in a step, it ends nothing: the pipeline can go on, and save again.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.errors import CheckpointError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from penstock.runtime.transport.protocol import Failure, Transport

_DONE, _FAILED = b"+", b"-"
_LENGTH: Final = struct.Struct("<q")
_PLAIN, _COMPRESSED = b"=", b"z"
#: Messages of more bytes are compressed: lists of names become much shorter.
_LONG: Final = 1 << 16
#: How many seconds a rank waits for a message: to write all of a large checkpoint takes some.
_PATIENCE: Final = 1800.0
#: How many seconds it still waits once the pipeline has failed: the others may be alive and about to finish.
_FAILURE_GRACE: Final = 10.0
#: How many seconds rank 0 waits until all have read its message.
_READ_GRACE: Final = 5.0
_SHORTEST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.05


class Channel(Protocol):
    """Passes bytes between rank 0 and all ranks."""

    rank: int
    ranks: int

    def gather(self, data: bytes) -> Sequence[bytes]:
        """Send bytes to rank 0; returns those of all ranks there. All ranks call it."""

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each rank its part from rank 0; `parts` count there. All ranks call it."""


class OneRank:
    """The channel of a rank that is alone."""

    rank, ranks = 0, 1

    def gather(self, data: bytes) -> Sequence[bytes]:
        """Return the bytes."""
        return [data]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return the only part."""
        return parts[0]


class TransportChannel:
    """A channel over the transport of a pipeline, for short messages while no step runs."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.ranks = transport.rank, transport.ranks
        self._transport = transport

    def gather(self, data: bytes) -> Sequence[bytes]:
        """Send bytes to rank 0."""
        return self._transport.exchange(data)

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each rank its part."""
        mine = b"".join(_LENGTH.pack(len(part)) + part for part in parts) if self.rank == 0 else b""
        joined = self._transport.exchange(mine)[0]
        start = 0
        for _ in range(self.rank):
            start += _LENGTH.size + _LENGTH.unpack_from(joined, start)[0]
        (length,) = _LENGTH.unpack_from(joined, start)
        return joined[start + _LENGTH.size :][:length]


class StoreChannel:
    """A channel over a store, also for another thread: it asks for messages, and does not wait in the store.

    Its users take turns: a thread that saves in the background has it until it ends.

    Args:
        store: shared by all ranks, over a connection that nothing else uses.
        rank: this rank.
        ranks: how many there are.
        failure: what has made the pipeline fail, if anything has; after that, waits are short.
    """

    def __init__(self, store: Store, rank: int, ranks: int, failure: Callable[[], Failure | None]) -> None:
        self.rank, self.ranks = rank, ranks
        self._store = store
        self._failure = failure
        self._count = 0

    def gather(self, data: bytes) -> Sequence[bytes]:
        """Send bytes to rank 0."""
        self._count += 1
        if self.rank > 0:
            self._put(f"{self._count}/from {self.rank}", data)
            return ()
        return [data, *(self._take(f"{self._count}/from {peer}", peer) for peer in range(1, self.ranks))]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each rank its part; rank 0 returns when all have it, since it may host the store, and end."""
        if self.rank > 0:
            return self._take(f"{self._count}/to {self.rank}", 0)
        keys = [f"{self._count}/to {peer}" for peer in range(1, self.ranks)]
        for key, part in zip(keys, parts[1:], strict=True):
            self._put(key, part)
        deadline = time.monotonic() + _READ_GRACE
        for key in keys:
            self._wait_until(lambda key=key: not self._store.check([key]), deadline)  # type: ignore[misc]
        return parts[0]

    def _put(self, key: str, data: bytes) -> None:
        self._store.set(key, _COMPRESSED + zlib.compress(data, 1) if len(data) > _LONG else _PLAIN + data)  # type: ignore[arg-type]  # bytes are fine

    def _take(self, key: str, peer: int) -> bytes:
        if not self._wait_until(lambda: self._store.check([key]), time.monotonic() + _PATIENCE):
            failure = self._failure()
            why = f"rank {failure.rank} failed: {failure.message}" if failure else f"nothing in {_PATIENCE:g} s"
            raise CheckpointError(f"rank {peer} does not take part in saving or loading: {why}", rank=peer)
        data = self._store.get(key)
        self._store.delete_key(key)
        return zlib.decompress(data[1:]) if data.startswith(_COMPRESSED) else data[1:]

    def _wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Ask until something holds; whether it does in time."""
        pause = _SHORTEST_PAUSE
        while not holds():
            now = time.monotonic()
            if now > deadline:
                return False
            if self._failure() is not None:
                deadline = min(deadline, now + _FAILURE_GRACE)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True


def run_on_all(
    channel: Channel, work: Callable[[], bytes], combine: Callable[[Sequence[bytes]], Sequence[bytes]]
) -> bytes:
    """Run `work` on every rank, then `combine` on rank 0 with what they have returned. All ranks call it.

    Args:
        channel: connects the ranks.
        work: what each rank does.
        combine: what rank 0 does with the results, in the order of ranks; returns an answer for each.

    Returns:
        The answer for this rank.

    Raises:
        CheckpointError: something has failed on any rank; it names the first one.
    """
    error: BaseException | None = None
    try:
        mine = _DONE + work()
    except BaseException as raised:  # the others must not wait for this rank
        error, mine = raised, _FAILED + _describe(raised, channel.rank)
    parts = channel.gather(mine)
    answers: Sequence[bytes] = ()
    if channel.rank == 0:
        answers = [part for part in parts if part.startswith(_FAILED)][:1] * channel.ranks
        if not answers:
            try:
                answers = [_DONE + answer for answer in combine([part[1:] for part in parts])]
            except BaseException as raised:
                error, answers = raised, [_FAILED + _describe(raised, 0)] * channel.ranks
    answer = channel.scatter(answers)
    if answer.startswith(_DONE):
        return answer[1:]
    if error is not None and not isinstance(error, Exception):
        raise error
    failure = json.loads(answer[1:])
    raise CheckpointError(failure["message"], path=failure["path"], rank=failure["rank"]) from error


def same_for_all(channel: Channel, answer: bytes) -> list[bytes]:
    """Give every rank the same answer."""
    return [answer] * channel.ranks


def share_results(channel: Channel, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank, and give what all of them have returned, plain data, to every rank."""

    def combine(parts: Sequence[bytes]) -> list[bytes]:
        return same_for_all(channel, b"[" + b",".join(parts) + b"]")

    results: list[Any] = json.loads(run_on_all(channel, lambda: json.dumps(work()).encode(), combine))
    return results


def _describe(error: BaseException, rank: int) -> bytes:
    """Describe an error for all ranks: our own errors say where they happened, if that matters."""
    if isinstance(error, PenstockError):
        message, path, place = str(error), getattr(error, "path", None), getattr(error, "rank", None)
    else:
        message, path, place = f"rank {rank} failed: {type(error).__name__}: {error}", None, rank
    return json.dumps({"message": message, "path": path, "rank": place}).encode()
