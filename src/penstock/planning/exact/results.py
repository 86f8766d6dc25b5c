"""Defines what the exact search returns, and reports on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.planning.orders import Order


class Progress(NamedTuple):
    """A better order, as soon as it is found.

    Attributes:
        order: the order.
        value: its value.
        bound: no order of this placement has a lower value, as far as that is proved by then.
    """

    order: Order
    value: float
    bound: float


@dataclass(frozen=True, slots=True, eq=False)
class ExactResult:
    """The best order found, and what is proved.

    Attributes:
        order: the order; that of the hint if none is better.
        value: its value, as simulated.
        bound: no order of this placement has a lower value.
        optimal: whether the two are equal, up to a share of 1e-9 of rounding.
        interrupted: whether Ctrl-C ended the search.
    """

    order: Order
    value: float
    bound: float
    optimal: bool
    interrupted: bool
