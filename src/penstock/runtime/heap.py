"""Memory of the host that is freed stays with the process, for it is needed again at once.

glibc gives the end of its heap back to the system whenever more of it than a threshold is free. Activations are freed
in a step and made again in the next, so without this every step asks for the same memory anew, page by page, which can
cost as much as a tenth of a step. The threshold follows what the program does: it is twice the largest block that was
freed, up to 32 MiB. So one such block is allocated and freed; nothing is ever written to it, and it costs nothing.

What is kept is less than 64 MiB. Where ``MALLOC_TRIM_THRESHOLD_`` or ``MALLOC_MMAP_THRESHOLD_`` is set, that holds and
this does nothing; nor does it with another allocator.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

#: The largest block that glibc's thresholds follow, with room for its header and alignment.
_LARGEST: Final = 32 * 2**20 - 8192


@cache
def keep_freed_memory() -> None:
    """Have the allocator keep some memory that is free. Once in a process is enough, and all that is done."""
    torch.UntypedStorage(_LARGEST)  # type: ignore[no-untyped-call]
