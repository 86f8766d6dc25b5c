"""Memory of the host that is freed stays with the process, for it is needed again at once; for all layers from here.

glibc gives the end of its heap back to the system whenever more of it than a threshold is free. The arrays of a large
schedule are freed by one pass and made again by the next, activations by one step and the next: without this each asks
for the same memory anew, page by page, which can cost a tenth of the time. The threshold follows what the program does:
it is twice the largest block that was freed, up to 32 MiB. So one such block is allocated and freed; nothing is ever
written to it, and it costs nothing.

What is kept is less than 64 MiB. Where ``MALLOC_TRIM_THRESHOLD_`` or ``MALLOC_MMAP_THRESHOLD_`` is set, that holds and
this does nothing; nor does it with another allocator.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

#: The largest block that glibc's thresholds follow, with room for its header and alignment.
_LARGEST: Final = 32 * 2**20 - 8192


@cache
def keep_freed_memory() -> None:
    """Have the allocator keep some memory that is free. Once in a process is enough, and all that is done."""
    np.empty(_LARGEST, np.int8)
