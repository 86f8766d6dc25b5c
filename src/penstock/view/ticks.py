"""Chooses round times for an axis."""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def ticks(extent: float, room: Callable[[int], float]) -> list[tuple[float, str]]:
    """Return round times from 0 to the extent, as numbers and as text; as many as fit, but at least 0.

    >>> ticks(12.0, lambda widest: 24 / (widest + 2))
    [(0.0, '0'), (2.0, '2'), (4.0, '4'), (6.0, '6'), (8.0, '8'), (10.0, '10'), (12.0, '12')]

    Args:
        extent: the last time, greater than 0.
        room: returns how many texts of a given length fit in addition to the first.
    """
    lowest = math.floor(math.log10(extent)) - 2
    for power in count(lowest):
        for digit in (1, 2, 5):
            step = digit * 10.0**power
            times = [number * step for number in range(int(extent / step * (1 + 1e-9)) + 1)]
            chosen = [(time, f"{time:.6g}") for time in times]
            if len(chosen) - 1 <= room(max(len(text) for _, text in chosen)):
                return chosen
    raise AssertionError("0 alone always fits")
