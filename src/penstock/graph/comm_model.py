"""How communication behaves: what a transfer waits for besides the two ranks that have posted it."""

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
    """A communication model: how much is buffered, and which transfers stand in line behind each other.

    Posting a send or a receive never blocks a rank; the operation waits in its lane, and what needs a receive waits for
    it.

    >>> CommModel(buffering="bounded(2)", lanes="direction").capacity
    2

    Attributes:
        buffering: ``"rendezvous"``: a send ends when its receive does; ``"bounded(k)"``: a send ends as soon as fewer
            than k messages from its rank to the other are under way; ``"eager"``: a send ends at once.
        lanes: what an operation stands in line with: all others of its rank (``"rank"``), those with the same peer
            (``"pair"``), those with the same peer in the same direction (``"direction"``), or none (``"message"``).
    """

    buffering: str = RENDEZVOUS
    lanes: str = "pair"

    def __post_init__(self) -> None:
        buffering: object = self.buffering
        lanes: object = self.lanes
        if not isinstance(buffering, str) or not (buffering in (RENDEZVOUS, EAGER) or _BOUNDED.fullmatch(buffering)):
            raise ModelError(
                f"buffering is 'rendezvous', 'bounded(1)', 'bounded(2)', ... or 'eager', not {self.buffering!r}"
            )
        if not isinstance(lanes, str) or lanes not in LANES:
            raise ModelError(f"lanes are one per {', '.join(LANES)}, not per {self.lanes!r}")

    @property
    def capacity(self) -> int | None:
        """How many messages a lane buffers: 0 for rendezvous, None for any number."""
        if self.buffering == RENDEZVOUS:
            return 0
        found = _BOUNDED.fullmatch(self.buffering)
        return int(found.group(1)) if found else None

    def __str__(self) -> str:
        return f"{self.buffering}, a lane per {self.lanes}"


#: Every combination worth a row in a table, the harshest first.
MODELS: Final = tuple(CommModel(buffering, lanes) for lanes in LANES for buffering in (RENDEZVOUS, "bounded(1)", EAGER))
