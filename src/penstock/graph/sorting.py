"""Sorts by several keys at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.signedinteger[Any]]

#: Up to this length, any sort is fast enough.
_FEW: Final = 1000
#: The number of bits that are sorted at a time.
_DIGIT: Final = 16


def order_by(*keys: Ints) -> Ints:
    """Return the stable order by the first key, then by the second, and so on; keys are not negative.

    All keys combined into one number sort several times faster than one after the other. The passes and the graph sort
    a few runs that are already sorted, which takes the time of a merge: it is linear.
    """
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if sum(size.bit_length() for size in sizes) > 62:
        return np.lexsort(keys[::-1])
    whole = keys[0].astype(np.int64)
    for key, size in zip(keys[1:], sizes[1:], strict=True):
        whole = whole * size + key
    return np.argsort(whole, kind="stable")  # mostly runs that are already sorted


def stable_order(key: Ints) -> Ints:
    """Return the stable order by a non-negative key. O(n) for every 16 bits of the key."""
    if len(key) <= _FEW:
        return key.argsort(kind="stable")
    digits = range(0, int(key.max()).bit_length(), _DIGIT) or (0,)
    order = _digit(key, digits[0]).argsort(kind="stable")
    for shift in digits[1:]:
        order = order[_digit(key[order], shift).argsort(kind="stable")]
    return order


def _digit(key: Ints, shift: int) -> NDArray[np.uint16]:
    """Return 16 bits of the key, starting at a bit; NumPy sorts 16-bit numbers without comparisons."""
    return (key >> shift if shift else key).astype(np.uint16)
