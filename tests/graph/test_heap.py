"""Memory that a pass or a step frees is there for the next."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

#: Tells how many bytes are mapped for a block of 20 MB alone, which go back to the system when it is freed; and how
#: many of 100 MB in small blocks go back when they are.
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

def given_back():
    blocks = [np.empty(100_000, np.int8) for _ in range(1000)]
    before = used().arena
    del blocks
    return before - used().arena

{work}
print(mapped(), given_back())
"""


WORK = {
    "nothing": ("import torch\nimport penstock.execution.stage", ""),
    "a stage": ("import torch\nfrom penstock.execution.stage import Stage", "Stage(0, torch.nn.Linear(2, 2))"),
    "a stage on an accelerator": (
        "import torch\nfrom penstock.execution.stage import Stage",
        "Stage(0, torch.nn.Linear(2, 2, device='meta'), device='meta')",
    ),
    "a stage of torch's kind": (
        "import torch, torch.distributed as dist\nfrom penstock.pipelining import PipelineStage",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device('cpu'))",
    ),
    "a large schedule": ("import penstock as ps", "ps.lower(ps.build('GPipe', ranks=32, microbatches=1024))"),
}
#: By which a user has free memory given back at once.
SETTINGS = ({"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"})
LARGE = 20_000_000
MANY = 30_000_000

about_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="about glibc's allocator")


def measured(work: str, settings: dict[str, str] | None = None) -> list[int]:
    others = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "PENSTOCK_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=WORK[work][0], work=WORK[work][1])],
        env=environment | (settings or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


@about_glibc
@pytest.mark.parametrize("work", ["nothing", "a stage on an accelerator"])
def test_memory_of_the_host_is_left_alone_where_nothing_is_in_it(work: str) -> None:
    mapped, given_back = measured(work)
    assert mapped >= LARGE
    assert given_back > MANY


@about_glibc
def test_some_memory_that_a_pass_over_a_large_schedule_frees_stays_with_the_process() -> None:
    mapped, given_back = measured("a large schedule")
    assert mapped == 0
    assert given_back > MANY


@about_glibc
@pytest.mark.parametrize("work", ["a stage", "a stage of torch's kind"])
def test_all_memory_that_a_stage_frees_stays_with_the_process(work: str) -> None:
    assert measured(work) == [0, 0]
    assert measured(work, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}) == [0, 0], "which is about something else"


@about_glibc
@pytest.mark.parametrize("work", ["a stage", "a stage of torch's kind", "a large schedule"])
def test_an_environment_variable_leaves_the_allocator_alone(work: str) -> None:
    mapped, given_back = measured(work, {"PENSTOCK_KEEP_FREED_MEMORY": "0"})
    assert mapped >= LARGE
    assert given_back > MANY


@about_glibc
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_what_the_environment_sets_holds(settings: dict[str, str]) -> None:
    _, given_back = measured("a stage", settings)
    assert given_back > MANY
