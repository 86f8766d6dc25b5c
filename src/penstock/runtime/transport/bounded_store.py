"""A store whose requests end, even if what hosts it, or the network to it, is gone without a trace."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch.distributed.distributed_c10d import Store

#: How many seconds a thread that is not in a request may take to end.
_END: Final = 1.0


class SilentStoreError(RuntimeError):
    """The store has not answered in time."""


class _Request(NamedTuple):
    call: Callable[[], Any]
    #: Gets the result, and None or what was raised.
    answer: SimpleQueue[tuple[Any, BaseException | None]]


class BoundedStore:
    """Makes requests of a store one after the other, in a thread that is abandoned when an answer takes too long.

    Torch's client waits for an answer for as long as the connection exists. If a host loses its power or its network,
    nothing closes the connection, and the kernel keeps it for a quarter of an hour.

    Args:
        store: the store.
        seconds: how long a request may take, longer than any timeout that is passed to ``wait``.
        name: the name of the thread.
    """

    def __init__(self, store: Store, seconds: float, name: str) -> None:
        self._store = store
        self._seconds = seconds
        self._turn = threading.Lock()
        self._is_silent = False
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._requests,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._requests.put, None)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask(partial(self._store.set, key, value))  # type: ignore[arg-type]  # bytes are fine

    def get(self, key: str) -> bytes:
        """Get a value, which exists."""
        return self._ask(partial(self._store.get, key))  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._ask(partial(self._store.check, keys))  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys exist."""
        self._ask(partial(self._store.wait, keys, timeout))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        return self._ask(partial(self._store.add, key, amount))  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value unless something other than expected is stored; returns what is stored."""
        return self._ask(partial(self._store.compare_set, key, expected, desired))  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._ask(partial(self._store.delete_key, key))  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread; it takes its time if it is in a request that is not answered."""
        self._end()
        if not self._is_silent:
            self._thread.join(_END)

    def _ask(self, call: Callable[[], Any]) -> Any:
        with self._turn:
            if self._is_silent:
                raise self._error()
            request = _Request(call, SimpleQueue())
            self._requests.put(request)
            try:
                result, error = request.answer.get(timeout=self._seconds)
            except Empty:
                self._is_silent = True
                raise self._error() from None
        if error is not None:
            raise error
        return result

    def _error(self) -> SilentStoreError:
        return SilentStoreError(f"no answer for {self._seconds:g} s")


def _serve(requests: SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        try:
            request.answer.put((request.call(), None))
        except BaseException as error:  # raised where the request was made
            request.answer.put((None, error))
        del request  # and with it, the store
