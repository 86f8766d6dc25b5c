"""What a pipeline keeps from one save to the next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.runtime.checkpoints.channel import run_on_all
from penstock.runtime.checkpoints.replicas import connect_replicas
from penstock.runtime.checkpoints.snapshot import Snapshots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.checkpoints.background import Saving
    from penstock.runtime.engine import Engine


class Saves:
    """The connection between all who save together, which of them writes what, and the last save.

    Attributes:
        channel: connects the ranks, those of all replicas.
        replica: which replica of the pipeline this is.
        is_complete: whether all replicas are known, and connected.
        snapshots: copies of what is being written.
        last: the last save in the background.
    """

    def __init__(self, engine: Engine) -> None:
        self.channel, self.replica, self.is_complete = connect_replicas(engine)
        self.snapshots = Snapshots()
        self.last: Saving | None = None
        self._digests: list[int] = []
        self._mine: frozenset[str] = frozenset()

    def settle(self) -> None:
        """Wait for the last save in the background; raise its error."""
        last, self.last = self.last, None
        if last is not None:
            last.settle()

    def knows(self, digests: Sequence[int]) -> bool:
        """Whether ranks have the same names as when they last agreed on who writes what; asked on rank 0."""
        return list(digests) == self._digests

    def names_to_write(self, names: Sequence[str], digests: Sequence[int], *, known: bool) -> frozenset[str]:
        """Find what this rank writes: of what several have, the first one does. All ranks call it.

        Args:
            names: what this rank has.
            digests: of the names of all ranks; they count on rank 0.
            known: whether it is what it was when this was last called.
        """
        if not known:
            answer = run_on_all(self.channel, lambda: json.dumps(list(names)).encode(), _divide)
            self._mine, self._digests = frozenset(json.loads(answer)), list(digests)
        return self._mine


def _divide(parts: Sequence[bytes]) -> list[bytes]:
    answers, seen = [], set()
    for part in parts:
        mine = [name for name in json.loads(part) if name not in seen]
        seen.update(mine)
        answers.append(json.dumps(mine).encode())
    return answers


def saves_of(engine: Engine) -> Saves:
    """Get what a pipeline keeps from one save to the next. All ranks call it."""
    if engine.saves is None or not engine.saves.is_complete:
        engine.saves = Saves(engine)
    return engine.saves
