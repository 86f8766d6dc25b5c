"""The compiler, loaded when a kernel is first wanted in compiled form."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@cache
def jit(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, compiled; kept in a cache on disk, unless there is no place for one that can be written."""
    from numba import njit

    try:
        fast: Callable[..., Any] = njit(cache=True)(kernel)
    except RuntimeError:  # neither the package nor the home directory can be written, as in some containers
        fast = njit(kernel)
    return fast
