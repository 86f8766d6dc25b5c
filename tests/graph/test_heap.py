"""Memory that a pass or a step frees is there for the next."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

#: Tells how many bytes are mapped for a block of 20 MB alone, which go back to the system when it is freed.
PROGRAM = """
import ctypes
import numpy as np
{imports}

class Used(ctypes.Structure):
    names = "arena ordblks smblks hblks mapped usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

used = ctypes.CDLL(None).mallinfo2
used.restype = Used

def mapped():
    before = used().mapped
    block = np.empty(20_000_000, np.int8)
    return used().mapped - before

first = mapped()
{work}
print(first, mapped())
"""


WORK = {
    "a stage": ("import torch\nfrom penstock.runtime.stage import Stage", "Stage(0, torch.nn.Linear(2, 2))"),
    "a large schedule": ("import penstock as ps", "ps.lower(ps.build('GPipe', ranks=32, microbatches=1024))"),
}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="about glibc's allocator")
@pytest.mark.parametrize("work", WORK)
def test_memory_that_is_freed_stays_with_the_process(work: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=WORK[work][0], work=WORK[work][1])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    assert before >= 20_000_000  # or this test shows nothing
    assert after == 0
