"""Compiles kernels with numba, which is loaded when it is first needed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@cache
def jit(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel, with a cache on disk if there is a writable place for it."""
    from numba import njit

    try:
        fast: Callable[..., Any] = njit(cache=True)(kernel)
    except RuntimeError:  # neither the package nor the home directory is writable, as in some containers
        fast = njit(kernel)
    return fast
