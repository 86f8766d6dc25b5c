"""Processes that are killed: every other rank names the one that is gone."""

import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PenstockError, StepError, TransportError
from penstock.runtime import Pipeline
from penstock.runtime.transport import connecting, distributed
from runtime.faults import (
    MICROBATCHES,
    PATIENCE,
    SOON,
    Faulty,
    call,
    error_of,
    fresh_modules,
    mse,
    threads,
)
from runtime.workers import Ended, Workers


def killed_after(rank, ranks, victim, seconds, note, *, group):
    """Steps, until the process of one rank is killed, at whatever it is then."""

    def kill():
        time.sleep(seconds)
        Path(note).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        threading.Thread(target=kill, daemon=True).start()
    schedule = ps.build("1F1B" if ranks < 3 else "ZBVZeroBubble", ranks=ranks, microbatches=MICROBATCHES)
    modules = fresh_modules(schedule, rank)
    pipe = None
    try:
        pipe = Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=PATIENCE)
        while True:
            call(pipe)
    except PenstockError as error:
        facts = type(error).__name__, str(error), time.time()
        left = sum(module.weight.grad is not None for module in modules.values())
    if pipe is not None:
        pipe.close()
    return *facts, left, threads()[0], os.getpid()


def check_kill(pool, ranks, victim, seconds, note):
    """Returns how long the slowest survivor took, and what it said."""
    results = pool.run(killed_after, victim, seconds, str(note), ranks=ranks, limit=30, deaths=True)
    processes = list(pool.process_ids)
    assert results.pop(victim) == Ended(victim, -signal.SIGKILL)
    killed_at = float(note.read_text())
    for kind, message, _, left, ours, _ in results:
        assert kind in ("StepError", "TransportError")
        assert "killed" in message, message
        assert re.search(rf"rank {victim}\b", message), message
        assert (left, ours) == (0, 0)
    pool.close()
    for process in [*processes, *[result[-1] for result in results]]:
        assert process is None or not Path(f"/proc/{process}").exists()
    return max(at for _, _, at, _, _, _ in results) - killed_at, {message for _, message, *_ in results}


def kills(count, seed):
    """How many ranks, which of them is killed, and when: while they connect, agree on shapes, or are in a step."""
    chance = random.Random(seed)
    sizes = [2 + number % 2 for number in range(count)]
    return [(ranks, number // 2 % ranks, round(chance.random() * 0.8, 3)) for number, ranks in enumerate(sizes)]


@pytest.mark.processes
@pytest.mark.parametrize("count", [12, pytest.param(42, marks=pytest.mark.full)])
def test_killed_ranks(count, tmp_path):
    """Some at a time, since most of the time ranks wait, to be sure that one is gone; a machine that is that busy may
    take longer for one of them.
    """

    def kill(number, ranks, victim, seconds):
        with Workers(ranks) as pool:
            return check_kill(pool, ranks, victim, seconds, tmp_path / f"killed{number}")

    with ThreadPoolExecutor(3) as several:
        done = [several.submit(kill, number, *how) for number, how in enumerate(kills(count, 2))]
        took = sorted(one.result()[0] for one in done)
    seen = {re.sub(r"\d+", "N", message) for one in done for message in one.result()[1]}
    median = took[count // 2]
    print(f"{count} kills, known after {took[-1]:.2f} s at most, {median:.2f} s as a rule")  # noqa: T201
    print(*sorted(seen), sep="\n")  # noqa: T201
    assert median < SOON
    assert took[-1] < 3 * PATIENCE


class Dying(nn.Linear):
    """Kills its process in the first forward, which is the one that finds the shapes."""

    def forward(self, *_, **__):
        os.kill(os.getpid(), signal.SIGKILL)


def dies_while_shapes_are_agreed(rank, ranks, *, group):
    schedule = ps.build("1F1B", ranks=ranks, microbatches=ranks)
    modules = fresh_modules(schedule, rank)
    if rank == 0:
        modules = {0: Dying(3, 3)}
    pipe = Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=3.0)
    try:
        with pytest.raises(PenstockError) as caught:
            call(pipe)
    finally:
        pipe.close()
    return str(caught.value)


@pytest.mark.processes
def test_a_rank_that_is_killed_while_shapes_are_agreed_is_named_by_all():
    """The last rank waits for the one between, which waits for the first."""
    with Workers(3) as pool:
        first, *others = pool.run(dies_while_shapes_are_agreed, ranks=3, limit=30, deaths=True)
    assert first == Ended(0, -signal.SIGKILL)
    for message in others:
        assert "killed" in message
        assert re.search(r"waits in step\(\) for rank 0, which", message), message


def dies_while_ranks_connect(rank, ranks, *, group):
    """When the others know its address, and have not used it yet."""
    private_group = connecting.PrivateGroup
    processes = [None] * ranks
    dist.all_gather_object(processes, os.getpid(), group)

    def connect(*args):
        if rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            wait_for_the_end_of(processes[0])
        return private_group(*args)

    connecting.PrivateGroup = connect
    begin = time.monotonic()
    with pytest.raises((TransportError, StepError)) as caught:
        distributed.DistributedTransport(group, timeout=3.0)
    return str(caught.value), time.monotonic() - begin


def wait_for_the_end_of(process):
    """Return when it has been killed with all of its threads, whether or not somebody has asked for its exit code."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            threads = [*Path(f"/proc/{process}/task").iterdir()]
        except OSError:
            return
        if state == "Z" and len(threads) == 1:  # its sockets live as long as any of them
            return
        time.sleep(0.02)
    raise TimeoutError(process)


@pytest.mark.processes
def test_a_rank_that_is_killed_while_ranks_connect_is_named_by_all():
    with Workers(3) as pool:
        first, *others = pool.run(dies_while_ranks_connect, ranks=3, limit=30, deaths=True)
    assert first == Ended(0, -signal.SIGKILL)
    for message, seconds in others:
        assert re.match(r"rank \d cannot connect to rank 0, which may have been killed", message), message
        assert seconds < SOON


def dies_while_connecting(rank, ranks, *, group):
    if rank == 1:
        connecting.PrivateGroup = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(
        lambda: Pipeline(
            {rank: Faulty(rank)},
            ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES),
            loss_fn=mse,
            group=group,
            timeout=1.0,
        )
    )
    return str(error), error.seconds


@pytest.mark.processes
def test_a_rank_that_dies_while_connecting():
    with Workers(2) as pool:
        (message, seconds), ended = pool.run(dies_while_connecting, deaths=True)
    assert ended == Ended(1, -signal.SIGKILL)
    assert message.startswith("rank 0 cannot connect to rank 1, which may have been killed")
    assert seconds < SOON
