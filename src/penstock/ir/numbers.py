"""Checks integers from users, of whatever integer type, and converts them to ``int``."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from penstock.errors import SizeError


def whole_number(field: str, value: SupportsIndex, *, least: int = 0, most: int | None = None) -> int:
    """Return the value as an ``int`` if it is an integer between ``least`` and ``most``.

    Raises:
        SizeError: names the field and the value.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise SizeError(f"{field} must be an integer, got {value!r}", field=field, value=value) from None
    if number < least:
        raise SizeError(f"{field} must be at least {least}, got {number}", field=field, value=value)
    if most is not None and number > most:
        raise SizeError(f"{field} must be at most {most}, got {number}", field=field, value=value)
    return number
