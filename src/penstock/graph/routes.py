"""Lists which stages exchange with which, by the distance between them, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.ir.dependencies import TRANSFERS, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.ir.dependencies import Need
    from penstock.ir.edges import Link
    from penstock.ir.schedule import Schedule

    Ints = NDArray[np.signedinteger[Any]]
    Stages = NDArray[np.bool_]

_NO_NUMBER: Final = -1
_NEXT_STAGE: Final = ((1, None),)


@dataclass(frozen=True, eq=False)
class Routes:
    """Which stages exchange with which.

    In a chain, every stage that exists exchanges with the next. So nothing is looked up in one: arrays of stages are
    None.

    Attributes:
        distances: how many stages apart stages that exchange are, ascending; the first is 1.
        values: for each distance, whether a link of this distance ends at each stage; None for a chain.
        gradients: for each distance, whether a link of this distance that has a gradient starts at each stage.
    """

    distances: tuple[int, ...] = (1,)
    values: NDArray[np.bool_] | None = None
    gradients: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Routes:
        """Return the routes of a schedule."""
        return CHAIN if schedule.is_chain else _over(schedule.links, schedule.stages)

    @property
    def is_chain(self) -> bool:
        """Whether every stage exchanges with the next, and with no other."""
        return self.values is None

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """How values and gradients get to other ranks: two transfers for every distance."""
        return tuple(transfer.over(distance) for distance in self.distances for transfer in TRANSFERS)

    def providers(self, need: Need) -> Iterable[tuple[int, Stages | None]]:
        """Return how far away stages that provide a need are, and to which stages they do; None is all of them."""
        linked = self.values if need.stage_offset < 0 else self.gradients
        if linked is None or need.stage_offset == 0:
            return _NEXT_STAGE
        return zip(self.distances, linked, strict=True)

    def receivers(self, transfer: Transfer) -> Stages | None:
        """Return which stages receive by this transfer; None for all that have a neighbour."""
        linked = self.gradients if transfer.is_backward else self.values
        return None if linked is None else linked[self.distances.index(transfer.distance)]

    def senders(self, transfer: Transfer) -> Stages | None:
        """Return which stages send by this transfer; None for all that have a neighbour."""
        receivers = self.receivers(transfer)
        if receivers is None:
            return None
        senders = np.zeros_like(receivers)
        stages = receivers.nonzero()[0]
        senders[stages - transfer.stage_offset] = True
        return senders

    def number_of(self, distances: Ints) -> Ints:
        """Return the index of each of these distances in ``distances``, -1 if it is none of them."""
        known = np.array(self.distances)
        number = known.searchsorted(distances)
        found = known[np.minimum(number, len(known) - 1)] == distances
        return np.where(found, number, _NO_NUMBER)


CHAIN: Final = Routes()


@lru_cache(maxsize=8)
def _over(links: tuple[Link, ...], stages: int) -> Routes:
    distances = tuple(sorted({1, *(link.target - link.source for link in links)}))
    values, gradients = np.zeros((2, len(distances), stages), bool)
    for link in links:
        number = distances.index(link.target - link.source)
        values[number, link.target] = True
        gradients[number, link.source] |= link.gradient
    for array in (values, gradients):
        array.setflags(write=False)  # cached
    return Routes(distances, values, gradients)
