"""Keeps freed host memory in the process, because it is needed again at once.

glibc returns the end of its heap to the system whenever more than a threshold of it is free. The arrays of a large
schedule are freed by one pass and allocated again by the next, and activations by one step and the next. Without this,
each of them requests the same memory again, page by page, which can cost a tenth of the time.

If the environment sets glibc's thresholds (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``,
``GLIBC_TUNABLES``), nothing is done here. With another allocator this has no effect.
``PENSTOCK_KEEP_FREED_MEMORY=0`` leaves the allocator as it is.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

import numpy as np

#: The largest block that glibc allocates from its heap; larger ones are mapped from the system each time.
_LARGEST: Final = 32 * 2**20
#: Room for the header of a block and its alignment.
_ROOM: Final = 8192
#: Parameters of ``mallopt``, as in malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = -1
#: Their names in the environment.
_THRESHOLDS: Final = ("trim_threshold", "mmap_threshold")


@cache
def keep_freed_memory() -> None:
    """Make the allocator keep up to 64 MiB of free memory. Runs once per process.

    glibc's threshold is twice the largest block that the program has freed. So this allocates and frees one such block;
    it is never written to, so it costs nothing.
    """
    if not _is_switched_off():
        np.empty(_LARGEST - _ROOM, np.int8)


@cache
def keep_all_freed_memory() -> None:
    """Make the allocator keep all free memory, as accelerator allocators do; for a process that repeats steps.

    Blocks of more than 32 MiB are still returned. glibc's ``malloc_trim`` returns the rest.
    """
    if _is_switched_off() or _is_set_by_user():
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, _NEVER)


def _is_switched_off() -> bool:
    return os.environ.get("PENSTOCK_KEEP_FREED_MEMORY") == "0"


def _is_set_by_user() -> bool:
    settings = os.environ.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}=" in settings for name in _THRESHOLDS)
