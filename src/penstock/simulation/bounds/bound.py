"""Defines ``Bounds``: what was proved of every schedule of a problem, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Bound(NamedTuple):
    """A value that no schedule goes below.

    Attributes:
        name: the argument it comes from.
        value: the bound; infinite if no schedule exists.
        rank: the rank for which the argument gives the highest value.
        words: the argument, in words.
    """

    name: str
    value: float
    rank: int
    words: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """What was proved of every schedule of a problem.

    Attributes:
        objective: what is bounded: "makespan", "span" or "period".
        found: the bounds, each by another argument, all of them valid.
    """

    objective: str
    found: tuple[Bound, ...]

    @property
    def best(self) -> float:
        """The highest of the bounds; infinite if no schedule exists."""
        return self._highest.value

    @property
    def rank(self) -> int:
        """The rank that it comes from."""
        return self._highest.rank

    @property
    def reason(self) -> str:
        """Why nothing is below it."""
        highest = self._highest
        if math.isinf(highest.value):
            return highest.words
        return f"{self.objective} is at least {highest.value:g}: {highest.words}"

    def __getitem__(self, name: str) -> float:
        """Return the bound with this name."""
        return next(bound.value for bound in self.found if bound.name == name)

    @property
    def _highest(self) -> Bound:
        """The highest bound; of equal ones the first, which is the simplest."""
        return max(self.found, key=lambda bound: bound.value)
