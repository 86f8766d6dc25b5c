"""Memory that a step frees is there for the next."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

#: Tells how many bytes are mapped for a block of 20 MB alone, which go back to the system when it is freed.
PROGRAM = """
import ctypes
import torch
from penstock.runtime.stage import Stage

class Used(ctypes.Structure):
    names = "arena ordblks smblks hblks mapped usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

used = ctypes.CDLL(None).mallinfo2
used.restype = Used

def mapped():
    before = used().mapped
    block = torch.UntypedStorage(20_000_000)
    return used().mapped - before

first = mapped()
Stage(0, torch.nn.Linear(2, 2))
print(first, mapped())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="about glibc's allocator")
def test_memory_that_is_freed_stays_with_the_process() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before >= 20_000_000  # or this test shows nothing
    assert after == 0
