"""What the ranks of a pipeline publish in the store: a failure, and the status of each rank.

Only JSON is written, of a bounded size. What is read is checked, since any process may have written it.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.runtime.transport.bounded_store import BoundedStore
from penstock.runtime.transport.protocol import Failure

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_VERSION: Final = 1
_FAILURE: Final = "failure"
_ROLL_CALL: Final = "roll call"
_ACKNOWLEDGED: Final = "acknowledged"
#: How many seconds a rank waits for the others to learn of a failure.
_ACKNOWLEDGE_GRACE: Final = 0.75
#: A status that is older than this, in seconds, counts as silence; ranks publish about once per second.
_SILENCE: Final = 5.0
#: Longer messages are cut in the middle, longer tracebacks at the beginning: their end says most.
_MAX_MESSAGE: Final = 8_000
_MAX_TRACEBACK: Final = 30_000
_MAX_LABEL: Final = 200
#: JSON takes at most twelve characters for one; with some room for the names.
_MAX_BYTES: Final = 12 * (_MAX_MESSAGE + _MAX_TRACEBACK) + 4_000


class RankStatus(NamedTuple):
    """Where a rank is, as it last published.

    Attributes:
        label: the text of its operation; None between steps.
        peer: the rank that it may have to wait for in it.
        seconds: how long it has been there.
        silent_for: how many seconds ago it published that, if that is longer than usual; else 0.
        closed_after: how many steps it had started when it closed its pipeline; None if it is open.
    """

    label: str | None
    peer: int | None
    seconds: float
    silent_for: float = 0.0
    closed_after: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the rank has closed its pipeline, and so sends nothing more."""
        return self.closed_after is not None


class StatusBoard:
    """The store, with a method for everything that is published there or read from it.

    Without an answer for ``timeout`` seconds, a method raises ``SilentStoreError``.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self._store = BoundedStore(store, timeout, f"penstock status board of rank {rank}")
        self._rank = rank
        self._ranks = ranks
        self._acknowledged_at: float | None = None

    def publish_failure(self, failure: Failure) -> Failure:
        """Publish a failure, unless there is one already; returns the published one."""
        found = self._store.compare_set(_FAILURE, "", encode(failure))
        return decode(found, self._rank)

    def failure(self) -> Failure | None:
        """Get the published failure, if any."""
        if not self._store.check([_FAILURE]):
            return None
        return decode(self._store.get(_FAILURE), self._rank)

    def publish_status(self, status: RankStatus) -> None:
        """Publish where this rank is."""
        fields = {
            "label": status.label,
            "peer": status.peer,
            "seconds": status.seconds,
            "at": time.time(),
            "closed_after": status.closed_after,
        }
        self._store.set(f"status/{self._rank}", json.dumps(fields))

    def status(self, rank: int) -> RankStatus | None:
        """Get where another rank is; None if it never published that, or it could not be decoded."""
        key = f"status/{rank}"
        if not self._store.check([key]):
            return None
        fields = _parse(self._store.get(key))
        try:
            age = max(0.0, time.time() - float(fields["at"]))
            return RankStatus(
                _text(fields["label"], _MAX_LABEL),
                _number(fields["peer"]),
                float(fields["seconds"]) + age,
                age if age > _SILENCE else 0.0,
                _number(fields.get("closed_after")),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def has_closed(self, rank: int) -> bool:
        """Whether another rank has closed its pipeline."""
        status = self.status(rank)
        return status is not None and status.is_closed

    def announce(self) -> None:
        """Answer roll calls while ranks connect: this rank is alive."""
        self._store.set(f"alive/{self._rank}", "")

    def is_roll_called(self) -> bool:
        """Whether another rank asks which ranks are alive."""
        return bool(self._store.check([_ROLL_CALL]))

    def unresponsive(self, grace: float) -> list[int]:
        """Call the roll; returns the ranks that have not answered after `grace` seconds."""
        self._store.set(_ROLL_CALL, "")
        deadline = time.monotonic() + grace
        left = [rank for rank in range(self._ranks) if rank != self._rank]
        while left := [rank for rank in left if not self._store.check([f"alive/{rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return left

    def acknowledge(self) -> None:
        """Publish that this rank knows of the failure."""
        self._acknowledged_at = time.monotonic()
        self._store.add(_ACKNOWLEDGED, 1)

    def has_message(self, key: str) -> bool:
        """Whether there is a message under a key that a thread of this rank waits for."""
        return bool(self._store.check([key]))

    def end_wait(self, key: str | None) -> None:
        """End the wait of another thread of this rank for a key, if it waits for one: by an empty value."""
        if key is not None:
            self._store.set(key, "")

    def await_acknowledgements(self) -> None:
        """Wait briefly until every rank knows of the failure that this one knows of.

        This rank may host the store, and exit when this returns.
        """
        if self._acknowledged_at is None:
            return
        deadline = self._acknowledged_at + _ACKNOWLEDGE_GRACE
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and self._store.add(_ACKNOWLEDGED, 0) < self._ranks:
                time.sleep(0.02)
        self._acknowledged_at = None

    def close(self) -> None:
        """Release the connection."""
        self._store.close()


def encode(failure: Failure) -> str:
    """Encode a failure as JSON, no longer than what `decode` reads."""
    message, trace = failure.message, failure.traceback
    if len(message) > _MAX_MESSAGE:
        half = _MAX_MESSAGE // 2 - 20
        message = f"{message[:half]} [... cut ...] {message[-half:]}"
    if trace is not None and len(trace) > _MAX_TRACEBACK:
        trace = f"[... cut ...]\n{trace[-(_MAX_TRACEBACK - 20) :]}"
    fields = {
        "version": _VERSION,
        "rank": failure.rank,
        "message": message,
        "action": None if failure.action is None else failure.action[:_MAX_LABEL],
        "stage": failure.stage,
        "microbatch": failure.microbatch,
        "traceback": trace,
    }
    return json.dumps(fields)


def decode(data: bytes, reader: int) -> Failure:
    """Decode a failure; if it cannot be decoded, that is the failure, on the rank that reads it."""
    fields = _parse(data)
    try:
        if fields["version"] != _VERSION:
            raise ValueError("another version")
        rank, message = _number(fields["rank"]), _text(fields["message"], _MAX_MESSAGE)
        if rank is None or message is None:
            raise ValueError("no rank, or no message")
        return Failure(
            rank,
            message,
            _text(fields["action"], _MAX_LABEL),
            _number(fields["stage"]),
            _number(fields["microbatch"]),
            _text(fields["traceback"], _MAX_TRACEBACK),
        )
    except (KeyError, TypeError, ValueError):
        shown = f"{data[:60]!r}{'...' if len(data) > 60 else ''}"
        return Failure(reader, f"a rank reported a failure that could not be decoded ({len(data)} bytes: {shown})")


def _parse(data: bytes) -> dict[str, Any]:
    """Parse the JSON object in some bytes; an empty one if there is none."""
    if len(data) > _MAX_BYTES:
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
