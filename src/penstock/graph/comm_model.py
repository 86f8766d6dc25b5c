"""Defines how communication behaves: what a transfer waits for after both ranks have posted it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from penstock.errors import ModelError

RENDEZVOUS: Final = "rendezvous"
EAGER: Final = "eager"
LANES: Final = ("rank", "pair", "direction", "message")

_BOUNDED: Final = re.compile(r"bounded\(([1-9][0-9]{0,8})\)")


@dataclass(frozen=True, slots=True)
class CommModel:
    """A communication model: how much is buffered, and which transfers queue behind each other.

    Posting a send or a receive never blocks a rank. The operation queues in its lane, and actions that need a receive
    wait for it.

    >>> CommModel(buffering="bounded(2)", lanes="direction").capacity
    2

    Attributes:
        buffering: ``"rendezvous"``: a send ends when its receive does; ``"bounded(k)"``: a send ends as soon as fewer
            than k messages from its rank to the other are in flight; ``"eager"``: a send ends at once.
        lanes: which operations share a lane and so queue behind each other: all of a rank (``"rank"``), those with the
            same peer (``"pair"``), those with the same peer in the same direction (``"direction"``), or none
            (``"message"``).
    """

    buffering: str = RENDEZVOUS
    lanes: str = "pair"

    def __post_init__(self) -> None:
        buffering: object = self.buffering
        lanes: object = self.lanes
        if not isinstance(buffering, str) or not (buffering in (RENDEZVOUS, EAGER) or _BOUNDED.fullmatch(buffering)):
            raise ModelError(
                f"unknown buffering {self.buffering!r}; use 'rendezvous', 'bounded(1)', 'bounded(2)', ... or 'eager'"
            )
        if not isinstance(lanes, str) or lanes not in LANES:
            raise ModelError(f"unknown lanes {self.lanes!r}; use 'rank', 'pair', 'direction' or 'message'")

    @property
    def capacity(self) -> int | None:
        """The number of messages that a lane buffers: 0 for rendezvous, None for any number."""
        if self.buffering == RENDEZVOUS:
            return 0
        found = _BOUNDED.fullmatch(self.buffering)
        return int(found.group(1)) if found else None

    def __str__(self) -> str:
        return f"{self.buffering}, a lane per {self.lanes}"


#: Every combination that is shown in tables, the strictest first.
MODELS: Final = tuple(CommModel(buffering, lanes) for lanes in LANES for buffering in (RENDEZVOUS, "bounded(1)", EAGER))
