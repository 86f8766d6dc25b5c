"""Ranks in threads whose clocks stand still but for the time that actions take: no machine is too busy for them."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace

from penstock.runtime import recording, run_in_threads


class LogicalTime:
    """A clock for every thread. Messages carry the time of the sender, and move the receiver's clock up to it."""

    def __init__(self):
        self._here = threading.local()
        self._sent = defaultdict(list)

    @property
    def now(self):
        return getattr(self._here, "now", 0.0)

    def take(self, seconds):
        """Let time go by in this thread."""
        self._here.now = self.now + seconds

    def until(self, moment):
        """Wait in this thread, if the moment is still to come."""
        self._here.now = max(self.now, moment)

    def run(self, worker, ranks, monkeypatch):
        """Call ``worker(transport)`` for every rank, and let recordings read these clocks."""
        monkeypatch.setattr(recording, "time", SimpleNamespace(perf_counter=lambda: self.now))
        return run_in_threads(lambda transport: worker(_Timed(transport, self)), ranks, timeout=60)


class _Timed:
    """The transport of a rank, with logical time."""

    def __init__(self, transport, time):
        self._transport = transport
        self._time = time
        self._received = defaultdict(int)

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def send(self, tensor, peer, tag):
        self._time._sent[self.rank, peer, tag].append(self._time.now)
        return self._transport.send(tensor, peer, tag)

    def receive(self, tensor, peer, tag):
        lane = peer, self.rank, tag
        number = self._received[lane]
        self._received[lane] += 1
        return _Receive(self._transport.receive(tensor, peer, tag), self._time, lane, number)

    def exchange(self, data):
        self._time.until(max(map(float, self._transport.exchange(repr(self._time.now).encode()))))
        return self._transport.exchange(data)


class _Receive:
    """A receive that ends when the message was sent, or when it is waited for."""

    def __init__(self, pending, time, lane, number):
        self._pending = pending
        self._time = time
        self._lane = lane
        self._number = number

    def wait(self):
        self._pending.wait()
        self._time.until(self._time._sent[self._lane][self._number])
