"""Sorting by several keys at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.signedinteger[Any]]

#: So many are sorted in no time.
_FEW: Final = 1000
#: How many bits are sorted at a time.
_DIGIT: Final = 16


def order_by(*keys: Ints) -> Ints:
    """How to sort by the first key, then by the second, and so on; keys are not negative. What is equal stays in order.

    One number made of all the keys is sorted several times faster than the keys one after the other. What the passes
    and the graph sort comes as a few runs that are sorted already, and takes the time of their merge: that is linear.
    """
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if sum(size.bit_length() for size in sizes) > 62:
        return np.lexsort(keys[::-1])
    whole = keys[0].astype(np.int64)
    for key, size in zip(keys[1:], sizes[1:], strict=True):
        whole = whole * size + key
    return np.argsort(whole, kind="stable")  # the rows mostly come in runs that are sorted already


def stable_order(key: Ints) -> Ints:
    """How to sort by a key that is not negative; what is equal stays in order. O(n) for every 16 bits of the key."""
    if len(key) <= _FEW:
        return key.argsort(kind="stable")
    digits = range(0, int(key.max()).bit_length(), _DIGIT) or (0,)
    order = _digit(key, digits[0]).argsort(kind="stable")
    for shift in digits[1:]:
        order = order[_digit(key[order], shift).argsort(kind="stable")]
    return order


def _digit(key: Ints, shift: int) -> NDArray[np.uint16]:
    """So many bits of the key, from one bit on: numbers that are sorted without comparing any."""
    return (key >> shift if shift else key).astype(np.uint16)
