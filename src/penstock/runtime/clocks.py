"""Estimates how far the clock of this rank is from that of rank 0, by round trips.

Rank 0 answers with its time. It read its clock between the two moments at which this rank sent the question and had the
answer: so half of the fastest round trip is the largest possible error. Processes of one machine read the same clock,
and ranks in one process certainly do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.transport.protocol import Transport

_ROUNDS: Final = 16
#: A number that Linux draws when it starts: processes that read the same one are on one machine.
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class ClockReading(NamedTuple):
    """What the clock of rank 0 showed at a moment.

    Attributes:
        moment: the moment, on the clock of this rank.
        ahead: how much more the clock of rank 0 showed.
        error: how much more or less that may have been.
    """

    moment: float
    ahead: float
    error: float


class Alignment(NamedTuple):
    """Converts times of this rank to those of rank 0, by a reading before them and one after: clocks drift."""

    first: ClockReading
    last: ClockReading

    @property
    def error(self) -> float:
        """By how many seconds a converted time may be wrong."""
        return max(self.first.error, self.last.error)

    def convert(self, time: float) -> float:
        """Return what the clock of rank 0 showed when that of this rank showed `time`."""
        between = self.last.moment - self.first.moment
        share = 0.0 if between <= 0 else min(1.0, max(0.0, (time - self.first.moment) / between))
        return time + self.first.ahead + share * (self.last.ahead - self.first.ahead)


def read_clocks(transport: Transport, now: Callable[[], float], rounds: int = _ROUNDS) -> ClockReading:
    """Compare the clock of this rank with that of rank 0. All ranks call it.

    Args:
        transport: connects the ranks.
        now: reads the clock of this rank.
        rounds: how many round trips each rank makes.
    """
    if transport.in_one_process:
        return ClockReading(now(), 0.0, 0.0)
    boots = transport.exchange(_boot_id())
    if transport.rank == 0:
        for peer in range(1, transport.ranks):
            for _ in range(rounds):
                transport.receive_bytes(peer)
                transport.send_bytes(peer, now().hex().encode())
        return ClockReading(now(), 0.0, 0.0)
    readings = []
    for _ in range(rounds):
        asked = now()
        transport.send_bytes(0, b"time")
        theirs = float.fromhex(transport.receive_bytes(0).decode())
        answered = now()
        readings.append(ClockReading((asked + answered) / 2, theirs - (asked + answered) / 2, (answered - asked) / 2))
    best = min(readings, key=lambda reading: reading.error)
    is_same = bool(boots[0]) and boots[0] == boots[transport.rank]
    if is_same and abs(best.ahead) <= best.error:  # a container may have a clock of its own
        return ClockReading(best.moment, 0.0, 0.0)
    return best


def _boot_id() -> bytes:
    try:
        return _BOOT.read_bytes().strip()
    except OSError:
        return b""
