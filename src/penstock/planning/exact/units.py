"""Turns costs into whole numbers, so that rounding cannot turn a bound into a wrong claim."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The largest whole number. Far below 2**63, so that sums cannot overflow.
LARGEST: Final = 2**36
#: Values that differ by less than this share are equal: simulated times are sums of rounded numbers.
ROUNDING: Final = 1e-9
#: A number is a multiple of a unit if it differs by no more than this share: 7 * 0.001 is not quite 0.007.
_NOISE: Final = 1e-12
#: Numbers whose ratios have larger denominators have no common unit.
_DENOMINATOR: Final = 10**6


class Units(NamedTuple):
    """How many whole units one unit of the costs is.

    >>> units = Units.of([0.5, 0.25, 3 * 0.1], largest=100)
    >>> units.round(3), units.is_exact
    (60, True)
    >>> Units.of([2**0.5, 1], largest=100).is_exact
    False

    Attributes:
        scale: the factor.
        is_exact: whether every number is a multiple of the whole unit; otherwise numbers are rounded down.
    """

    scale: Fraction
    is_exact: bool

    @classmethod
    def of(cls, numbers: Iterable[float], largest: float) -> Units:
        """Return the coarsest units in which these numbers are whole, or the finest ones if ``largest`` is too much."""
        given = sorted({float(number) for number in numbers if number})
        if not given:
            return cls(Fraction(1), is_exact=True)
        base = Fraction(given[-1])
        ratios = [(Fraction(number) / base).limit_denominator(_DENOMINATOR) for number in given]
        is_near = (
            abs(ratio * base - Fraction(number)) <= _NOISE * number for ratio, number in zip(ratios, given, strict=True)
        )
        if all(is_near):
            common = lcm(*(ratio.denominator for ratio in ratios))
            scale = Fraction(common, gcd(*(int(ratio * common) for ratio in ratios))) / base
            if scale * Fraction(largest) <= LARGEST:
                return cls(scale, is_exact=True)
        return cls(LARGEST / Fraction(max(largest, given[-1])), is_exact=False)

    def round(self, number: float) -> int:
        """Return the whole number of units in one of the numbers; rounded down if they are not exact."""
        units = Fraction(float(number)) * self.scale
        return round(units) if self.is_exact else floor(units)

    def nearly_down(self, number: float) -> int:
        """Return the units in the sum of some numbers, rounded down, but up if that is within rounding."""
        return floor(Fraction(float(number)) * (1 + Fraction(ROUNDING)) * self.scale)

    def nearly_up(self, number: float) -> int:
        """Return the units in such a sum, rounded up, but down if that is within rounding."""
        return ceil(Fraction(float(number)) * (1 - Fraction(ROUNDING)) * self.scale)

    def back(self, units: float) -> float:
        """Return what this number of units is in the units of the costs."""
        return float(Fraction(units) / self.scale)
