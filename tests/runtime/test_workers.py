import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.workers import Ended, WorkerError, Workers

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Start:
    number: int


def total(rank, ranks, start: Start, *, group):
    number = torch.tensor(start.number + rank)
    dist.all_reduce(number, group=group)
    return ranks, dist.get_world_size(group), number


def process(rank, ranks):
    return os.getpid(), torch.get_num_threads()


def fail_on(rank, ranks, where):
    if rank == where:
        raise ValueError(f"failed on {rank}")
    return rank


def wait_for_others(rank, ranks, *, group):
    if rank == 1:
        raise KeyError("one of two")
    dist.recv(torch.zeros(1), 1, group=group)


def hang(rank, ranks):
    if rank == 1:
        sys.stdout.write("started\n")
        stuck_here()


def stuck_here():
    time.sleep(1000)


def die(rank, ranks):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def warn(rank, ranks):
    warnings.warn("not so good", stacklevel=1)


def deprecated_in_torch(rank, ranks):
    warnings.warn_explicit("old", DeprecationWarning, "torch/old.py", 1, module="torch.old")
    return "fine"


def unsendable(rank, ranks):
    return lambda: None


def leave_a_message(rank, ranks, *, group):
    if rank == 0:
        dist.isend(torch.full((1,), 7.0), 1, group=group)
    dist.barrier(group=group)  # or rank 1 could have left the group before it is sent


def take_a_message(rank, ranks, *, group):
    number = torch.zeros(1)
    if rank == 0:
        dist.send(torch.ones(1), 1, group=group)
    else:
        dist.recv(number, 0, group=group)
    return number.item()


def random_number(rank, ranks):
    return torch.rand(()).item()


def test_the_function_runs_on_every_rank_with_a_group(workers):
    for ranks, numbers in ((None, [46] * 4), (2, [21] * 2), (1, [10]), (3, [33] * 3), (2, [21] * 2)):
        results = workers.run(total, Start(10), ranks=ranks)
        assert [number.item() for _, _, number in results] == numbers
        assert {(size, world) for size, world, _ in results} == {(len(numbers), len(numbers))}


def test_processes_are_reused(workers):
    first = workers.run(process)
    assert workers.run(process) == first
    assert [process_id for process_id, _ in first] == workers.process_ids
    assert {threads for _, threads in first} == {1}


def test_an_exception_is_raised_in_the_tests(workers):
    with pytest.raises(WorkerError, match="rank 2: ValueError: failed on 2") as caught:
        workers.run(fail_on, 2)
    assert caught.value.rank == 2
    assert isinstance(caught.value.error, ValueError)
    assert "in fail_on" in str(caught.value)
    assert workers.run(fail_on, 99) == [0, 1, 2, 3]


def test_the_stack_of_a_rank_that_waits_for_a_failed_one_is_shown(workers, monkeypatch):
    monkeypatch.setattr("runtime.workers.GRACE", 0.5)
    with pytest.raises(WorkerError) as caught:
        workers.run(wait_for_others, ranks=2)
    assert isinstance(caught.value.error, KeyError)
    assert "no answer within 0.5 s after that from rank 0" in str(caught.value)
    assert "in wait_for_others" in str(caught.value).split("output of rank 0")[1]


def test_a_hang_ends_with_the_stacks(workers):
    workers.run(process)
    before = workers.process_ids
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"no answer within 3 s from rank 1") as caught:
        workers.run(hang, limit=3)
    assert time.monotonic() - began < 20
    assert caught.value.rank == 1
    assert "started" in str(caught.value)
    assert "in stuck_here" in str(caught.value)
    assert not any(alive(process_id) for process_id in before)
    assert workers.run(fail_on, 99) == [0, 1, 2, 3]


def test_a_process_that_dies(workers):
    with pytest.raises(WorkerError, match="rank 0: the process has ended with exit code -9"):
        workers.run(die)
    assert workers.run(die, deaths=True, ranks=2) == [Ended(0, -9), 1]
    assert workers.run(fail_on, 99, ranks=2) == [0, 1]


def test_warnings_are_errors_as_in_the_tests(workers):
    with pytest.raises(WorkerError, match="UserWarning: not so good"):
        workers.run(warn, ranks=1)
    assert workers.run(deprecated_in_torch, ranks=1) == ["fine"]


def test_functions_and_results_that_cannot_be_sent(workers):
    with pytest.raises(WorkerError, match=r"rank 0: .*[Pp]ickle"):
        workers.run(unsendable, ranks=1)
    with pytest.raises(TypeError, match="top of its module"):
        workers.run(lambda rank, ranks: None)


def test_a_fresh_group_has_no_old_messages(workers):
    workers.run(leave_a_message, ranks=2, fresh=True)
    assert workers.run(take_a_message, ranks=2) == [0, 1]


def test_every_run_has_the_same_random_numbers(workers):
    assert workers.run(random_number) == workers.run(random_number)


def test_no_more_ranks_than_processes(workers):
    with pytest.raises(ValueError, match="there are 4"):
        workers.run(process, ranks=5)


def test_processes_end_when_the_pool_is_closed():
    with Workers(2) as pool:
        ids = [process_id for process_id, _ in pool.run(process)]
        assert all(alive(process_id) for process_id in ids)
    assert not any(alive(process_id) for process_id in ids)


ABANDON = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from runtime.workers import Workers

if __name__ == "__main__":
    pool = Workers(2)
    pool._start()
    sys.stdout.write(" ".join(map(str, pool.process_ids)))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_when_the_tests_are_killed(tmp_path):
    script = tmp_path / "abandon.py"
    script.write_text(ABANDON.format(folder=str(Path(__file__).parents[1])))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    ids = [int(word) for word in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL
    assert len(ids) == 2
    end = time.monotonic() + 10
    while any(alive(process_id) for process_id in ids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(process_id) for process_id in ids)


def alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
