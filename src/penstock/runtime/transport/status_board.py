"""What the ranks of a pipeline read of each other in the store: the failure, and how far everyone is.

Only JSON is written, of a bounded size; what is read is checked, since anyone may have written it.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.runtime.transport.protocol import Failure

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_VERSION: Final = 1
_FAILURE: Final = "failure"
_ASKED: Final = "who is there"
#: How many seconds a rank stays for the others to learn of a failure.
_STAY: Final = 0.75
#: Longer messages are cut in the middle; tracebacks at their beginning, the end says most.
_MOST_MESSAGE: Final = 8_000
_MOST_TRACEBACK: Final = 30_000
#: JSON writes a character in at most twelve; with some room for the names.
_MOST_BYTES: Final = 12 * (_MOST_MESSAGE + _MOST_TRACEBACK) + 4_000


class RankStatus(NamedTuple):
    """Where a rank is, as it told last.

    Attributes:
        label: the text of its operation; None between steps.
        peer: the rank that it may have to wait for in it.
        seconds: how long it has been there.
        silent_for: how long ago it told that, beyond what is usual.
        closed_after: how many steps it had begun when it closed its pipeline; None if it has not.
    """

    label: str | None
    peer: int | None
    seconds: float
    silent_for: float = 0.0
    closed_after: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the rank is done, and gives nobody anything any more."""
        return self.closed_after is not None


class StatusBoard:
    """The store, with a method for everything that is written to it or read from it."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._knows_since: float | None = None

    def publish_failure(self, failure: Failure) -> Failure:
        """Write a failure, unless there is one already; returns the one that is there."""
        found = self._store.compare_set(_FAILURE, "", encoded(failure))
        return decoded(found, self._rank)

    def failure(self) -> Failure | None:
        """The failure that is there, if any."""
        if not self._store.check([_FAILURE]):
            return None
        return decoded(self._store.get(_FAILURE), self._rank)

    def publish_status(self, status: RankStatus) -> None:
        """Write where this rank is."""
        told = {
            "label": status.label,
            "peer": status.peer,
            "seconds": status.seconds,
            "at": time.time(),
            "closed_after": status.closed_after,
        }
        self._store.set(f"status/{self._rank}", json.dumps(told))

    def status(self, rank: int) -> RankStatus | None:
        """Where another rank is; None if it has never told, or not so that it can be understood."""
        key = f"status/{rank}"
        if not self._store.check([key]):
            return None
        told = _object(self._store.get(key))
        try:
            age = max(0.0, time.time() - float(told["at"]))
            return RankStatus(
                _text(told["label"], 200),
                _number(told["peer"]),
                float(told["seconds"]) + age,
                age if age > 5 else 0.0,
                _number(told.get("closed_after")),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def announce(self) -> None:
        """Say that this rank is there, while ranks connect."""
        self._store.set(f"alive/{self._rank}", "")

    def is_roll_called(self) -> bool:
        """Whether another rank wants to know who is there."""
        return bool(self._store.check([_ASKED]))

    def unresponsive(self, grace: float) -> list[int]:
        """Ask who is there; the ranks that have not answered after `grace` seconds."""
        self._store.set(_ASKED, "")
        deadline = time.monotonic() + grace
        left = [rank for rank in range(self._ranks) if rank != self._rank]
        while left := [rank for rank in left if not self._store.check([f"alive/{rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return left

    def acknowledge(self) -> None:
        """Say that this rank knows of the failure."""
        self._knows_since = time.monotonic()
        self._store.add("knows", 1)

    def has_message(self, key: str) -> bool:
        """Whether there is something under a key for which a thread of this rank waits."""
        return bool(self._store.check([key]))

    def end_wait(self, key: str | None) -> None:
        """End the wait of another thread of this rank for a key, if it waits for one: by a value that is none."""
        if key is not None:
            self._store.set(key, "")

    def await_acknowledgements(self) -> None:
        """Wait until every rank knows of the failure that this one knows of, for a moment at most.

        This rank may be the one that hosts the store, and end when this returns.
        """
        if self._knows_since is None:
            return
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < self._knows_since + _STAY and self._store.add("knows", 0) < self._ranks:
                time.sleep(0.02)
        self._knows_since = None

    def close(self) -> None:
        """Give the connection back."""
        del self._store


def encoded(failure: Failure) -> str:
    """A failure as JSON, not longer than what is read."""
    message, trace = failure.message, failure.traceback
    if len(message) > _MOST_MESSAGE:
        half = _MOST_MESSAGE // 2 - 20
        message = f"{message[:half]} [... cut ...] {message[-half:]}"
    if trace is not None and len(trace) > _MOST_TRACEBACK:
        trace = f"[... cut ...]\n{trace[-(_MOST_TRACEBACK - 20) :]}"
    fields = {
        "version": _VERSION,
        "rank": failure.rank,
        "message": message,
        "action": None if failure.action is None else failure.action[:200],
        "stage": failure.stage,
        "microbatch": failure.microbatch,
        "traceback": trace,
    }
    return json.dumps(fields)


def decoded(data: bytes, reader: int) -> Failure:
    """The failure that was written. What cannot be read is a failure too, and says so."""
    told = _object(data)
    try:
        if told["version"] != _VERSION:
            raise ValueError("another version")
        rank, message = _number(told["rank"]), _text(told["message"], _MOST_MESSAGE)
        if rank is None or message is None:
            raise ValueError("no rank, or no message")
        return Failure(
            rank,
            message,
            _text(told["action"], 200),
            _number(told["stage"]),
            _number(told["microbatch"]),
            _text(told["traceback"], _MOST_TRACEBACK),
        )
    except (KeyError, TypeError, ValueError):
        shown = f"{data[:60]!r}{'...' if len(data) > 60 else ''}"
        return Failure(reader, f"a failure was told that cannot be read: {len(data)} bytes, {shown}")


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > _MOST_BYTES:
        return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31):
        return value
    raise ValueError("not a number")


def _text(value: object, most: int) -> str | None:
    if value is None or (isinstance(value, str) and len(value) <= most):
        return value
    raise ValueError("not a text")
