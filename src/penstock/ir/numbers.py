"""Whole numbers from users: checked, and made plain ones, whatever kind of integer they came as."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from penstock.errors import SizeError


def whole_number(field: str, value: SupportsIndex, *, least: int = 0, most: int | None = None) -> int:
    """The value as an ``int``, if it is a whole number from ``least`` to ``most``.

    Raises:
        SizeError: names the field and the value.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise SizeError(f"{field} must be a whole number, not {value!r}", field=field, value=value) from None
    if number < least:
        raise SizeError(f"{field} must be at least {least}, not {number}", field=field, value=value)
    if most is not None and number > most:
        raise SizeError(f"{field} must be at most {most}, not {number}", field=field, value=value)
    return number
