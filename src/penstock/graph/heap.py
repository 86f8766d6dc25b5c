"""Memory of the host that is freed stays with the process, for it is needed again at once; for all layers from here.

glibc gives the end of its heap back to the system whenever more of it than a threshold is free. The arrays of a large
schedule are freed by one pass and made again by the next, activations by one step and the next: without this each asks
for the same memory anew, page by page, which can cost a tenth of the time.

Where the environment sets glibc's thresholds (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``,
``GLIBC_TUNABLES``), that holds and nothing is done here; nor does it help or harm with another allocator.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

import numpy as np

#: The largest block that glibc takes from its heap; larger ones come from the system each time.
_LARGEST: Final = 32 * 2**20
#: Room for the header of a block and its alignment.
_ROOM: Final = 8192
#: Parameters of ``mallopt``, as in malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = -1
#: As they are called in the environment.
_THRESHOLDS: Final = ("trim_threshold", "mmap_threshold")


@cache
def keep_freed_memory() -> None:
    """Have the allocator keep some memory that is free, up to 64 MiB. Once in a process is all that is done.

    The threshold is twice the largest block that the program has freed. So one such block is allocated and freed;
    nothing is ever written to it, and it costs nothing.
    """
    np.empty(_LARGEST - _ROOM, np.int8)


@cache
def keep_all_freed_memory() -> None:
    """Have the allocator keep all memory that is free, as those of accelerators do: for a process that repeats steps.

    Blocks of more than 32 MiB still go back. ``malloc_trim`` of glibc gives the rest back, too.
    """
    if _is_set_by_user():
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, _NEVER)


def _is_set_by_user() -> bool:
    settings = os.environ.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}=" in settings for name in _THRESHOLDS)
