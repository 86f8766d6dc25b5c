"""What happens when something goes wrong on one rank: one clear error on all of them, soon, and nothing left behind."""

import contextlib
import itertools
import os
import random
import re
import resource
import signal
import struct
import threading
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import penstock as ps
from penstock.errors import PenstockError, StepError, TransportError
from penstock.execution import wire_format
from penstock.execution.framing import VERSION, decode_numbers, encode_numbers, join_parts, split_parts
from penstock.execution.trees import TENSOR
from penstock.execution.value_spec import TensorSpec, ValueSpec
from penstock.ir.actions import ComputationType
from penstock.runtime import Microbatches, Pipeline, Stage, run_in_threads
from penstock.runtime.transport import connecting, distributed
from runtime.faults import (
    MICROBATCHES,
    Faulty,
    InjectedError,
    Told,
    attempt,
    batch,
    call,
    faults,
    fresh_modules,
    is_right,
    lowered,
    mse,
    problems,
    set_fault,
    threads,
)
from runtime.workers import Ended, Workers

#: Within so many seconds every rank that is in the step knows.
SOON = 5.0
#: The seconds after which a rank that is silent counts as gone, where ranks are killed.
PATIENCE = 3.0
SMALL = [("1F1B", 2), ("1F1B", 3), ("ZBVZeroBubble", 2), ("ZBVZeroBubble", 3)]


@pytest.fixture(autouse=True)
def _one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    yield
    torch.set_num_threads(count)
    assert set(threading.enumerate()) <= before


# An exception in every action -----------------------------------------------------------------------------------------


def fail_once(rank, schedule, action, together, make):
    """A good step, one in which an action of some rank fails, and the call after it."""
    modules = fresh_modules(schedule, rank)
    told = Told()
    pipe = make(modules, schedule)
    try:
        call(pipe)
        told.right = is_right(modules, schedule.stages)
        if action is not None:
            set_fault(pipe, modules, action, told)
        together()
        return attempt(pipe, modules, told, together)
    finally:
        pipe.close()


@pytest.mark.parametrize(("name", "ranks"), SMALL)
def test_an_exception_in_every_action_in_threads(name, ranks):
    schedule = lowered(name, ranks)
    found = []
    for rank, position in faults(name, ranks):
        action = schedule.actions[rank][position]
        together = threading.Barrier(ranks)

        def worker(transport, rank=rank, action=action, together=together):
            return fail_once(
                transport.rank,
                schedule,
                action if transport.rank == rank else None,
                together.wait,
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, transport=transport),
            )

        found += problems(run_in_threads(worker, ranks, timeout=60), action, rank)
    assert found == []


def every_action(rank, ranks, name, part, parts, *, group):
    """All of them, one after the other, in the same processes."""
    schedule = lowered(name, ranks)
    tolds, counts = [], []
    for failing, position in faults(name, ranks)[part::parts]:
        action = schedule.actions[failing][position] if failing == rank else None
        tolds.append(
            fail_once(
                rank,
                schedule,
                action,
                lambda: dist.barrier(group),
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=30),
            )
        )
        counts.append(threads())
    modules = fresh_modules(schedule, rank)
    with Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=30) as pipe:
        call(pipe)
    return tolds, is_right(modules, schedule.stages), counts


def check_every_action(workers, name, ranks, part=0, parts=1):
    schedule = lowered(name, ranks)
    results = workers.run(every_action, name, part, parts, ranks=ranks, limit=900)
    found = []
    slowest = 0.0
    for number, (rank, position) in enumerate(faults(name, ranks)[part::parts]):
        tolds = [tolds[number] for tolds, _, _ in results]
        found += problems(tolds, schedule.actions[rank][position], rank, soon=SOON)
        began = max(told.failed_at for told in tolds)
        slowest = max([slowest, *[told.at - began for told in tolds if told.error is not None]])
    assert found == []
    assert all(right for _, right, _ in results)
    for _, _, counts in results:
        assert all(ours == 0 for ours, _ in counts)
        assert counts[-1][1] <= counts[0][1] + 1  # those of gloo come and go
    return slowest


@pytest.mark.parametrize(
    ("name", "ranks"), [one if one[1] == 2 else pytest.param(*one, marks=pytest.mark.full) for one in SMALL]
)
def test_an_exception_in_every_action(workers, name, ranks):
    print(f"{name} on {ranks} ranks: known after {check_every_action(workers, name, ranks):.2f} s at most")  # noqa: T201


def test_an_exception_in_some_actions_of_three_ranks(workers):
    check_every_action(workers, "1F1B", 3, parts=8)


# Processes that are killed --------------------------------------------------------------------------------------------


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
        told = type(error).__name__, str(error), time.time()
        left = sum(module.weight.grad is not None for module in modules.values())
    if pipe is not None:
        pipe.close()
    return *told, left, threads()[0], os.getpid()


def check_kill(pool, ranks, victim, seconds, note):
    """Returns how long the slowest survivor took, and what it was told."""
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
    for told in others:
        assert "killed" in told
        assert re.search(r"waits in step\(\) for rank 0, which", told), told


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
    for told, seconds in others:
        assert re.match(r"rank \d cannot connect to rank 0, which may have been killed", told), told
        assert seconds < SOON


# A rank that stalls ---------------------------------------------------------------------------------------------------


class Slow(Faulty):
    """Sleeps once, where it would fail."""

    def spring(self, kind, number):
        if self.fault == (kind, number):
            self.fault = None
            time.sleep(4.5)


def stalls(rank, ranks, *, group):
    schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
    module = Slow(rank)
    with Pipeline({rank: module}, schedule, loss_fn=mse, group=group, timeout=2.0) as pipe:
        call(pipe)
        if rank == 0:
            module.fault = ("F", 1)
        with pytest.raises(StepError) as caught:
            call(pipe)
    return caught.value.rank, str(caught.value), module.weight.grad is None


def test_a_stalled_rank(workers):
    results = workers.run(stalls, ranks=3)
    assert len({(rank, message) for rank, message, _ in results}) == 1
    message = results[0][1]
    # Rank 2, which waits for rank 1, may be the first to tell.
    assert re.search(r"rank 1(, which)? waits in 1RECV_F1 for rank 0, which has been in 0F1 for \d s", message), message
    assert all(dropped for _, _, dropped in results)


def one_is_late(rank, ranks, *, group):
    """Between two steps one rank is busy with something else."""
    schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
    with Pipeline({rank: Faulty(rank)}, schedule, loss_fn=mse, group=group, timeout=1.0) as pipe:
        call(pipe)
        if rank == 0:
            time.sleep(3.0)
        with pytest.raises(StepError) as caught:
            call(pipe)
    return str(caught.value)


def test_a_rank_that_is_late_for_a_step(workers):
    first, *others = workers.run(one_is_late, ranks=2)
    assert first.startswith("the pipeline has failed and must be rebuilt; the cause: rank 1 waits in")
    assert all("waits in 1RECV_F0 for rank 0, which is between steps" in message for message in others)


def one_leaves_early(rank, ranks, calls, *, group):
    """One rank closes its pipeline after two steps; the other goes on with the given calls."""
    schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
    errors = []
    for going_on in calls:
        with Pipeline({rank: Faulty(rank)}, schedule, loss_fn=mse, group=group, timeout=60.0) as pipe:
            call(pipe)
            call(pipe)
            if rank == 0:
                errors.append(error_of(lambda pipe=pipe, going_on=going_on: going_on(pipe)))
    return errors


def clip(pipe):
    pipe.clip_grad_norm_(1.0)


def test_a_rank_that_has_closed_its_pipeline_is_named(workers):
    errors, _ = workers.run(one_leaves_early, [call, clip], ranks=2)
    for error, place in zip(errors, [r"0\w+", r"clip_grad_norm_\(\)"], strict=True):
        assert isinstance(error, StepError)
        left = "which closed its pipeline after 2 steps; all ranks must run the same number of steps"
        assert re.search(f"rank 0 waits in {place} for rank 1, {left}", str(error)), str(error)
        assert error.seconds < SOON


# Values that are not what was agreed ----------------------------------------------------------------------------------


class Odd(Faulty):
    """For microbatch 1 it gives something else, once it is told to."""

    change = None

    def forward(self, x, number=-1):
        out = super().forward(x, number)
        return CHANGES[self.change](out) if self.change and number == 1 else out


CHANGES = {
    "larger": lambda out: torch.cat([out, out] * 300),
    "smaller": lambda out: out[:1],
    "turned": lambda out: out.T,
    "double": lambda out: out.double(),
    "tuple": lambda out: (out, out),
    "dict": lambda out: {"x": out},
    "number": lambda out: 3,
    "set": lambda out: {out},
    "sparse": lambda out: out.detach().to_sparse(),
    "constant": lambda out: out.detach(),
}
SAID = {
    "larger": "output is float32[1200, 3], but float32[2, 3] was agreed",
    "smaller": "output is float32[1, 3], but float32[2, 3] was agreed",
    "turned": "output is float32[3, 2], but float32[2, 3] was agreed",
    "double": "output is float64[2, 3], but float32[2, 3] was agreed",
    "tuple": "output is a tuple of 2, but a tensor was agreed",
    "dict": "output is a dict with the keys 'x', but a tensor was agreed",
    "number": "output is 3, but a tensor was agreed",
    "set": "set, which cannot be sent between stages",
    "sparse": "sparse",
    "constant": "output has requires_grad=False, but True was agreed",
}


def odd_values(rank, make, changes):
    """For each change: a good step, then one in which stage 1 gives something else in its middle microbatch."""
    schedule = ps.build("1F1B", ranks=3, microbatches=MICROBATCHES)
    found = []
    for change in changes:
        module = Odd(rank)
        pipe = make({rank: module}, schedule)
        call(pipe)
        module.change = change if rank == 1 else None
        found.append(error_of(lambda pipe=pipe: call(pipe)))
        assert module.weight.grad is None
        pipe.close()
    return found


def error_of(function):
    """What it raises, without what would not go to another process."""
    began = time.monotonic()
    try:
        function()
    except BaseException as error:
        error.printed = "".join(traceback.format_exception(error))
        error.seconds = time.monotonic() - began
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    return None


def odd_values_in_processes(rank, ranks, *, group):
    return odd_values(
        rank, lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=20), CHANGES
    )


def check_odd_values(results):
    for errors, change in zip(zip(*results, strict=True), CHANGES, strict=True):
        for error in errors:
            assert isinstance(error, StepError), error
            assert (error.rank, error.stage, error.microbatch, error.action) == (1, 1, 1, "1F1")
            assert "MetadataError: " in str(error) or change in ("set", "sparse")
            assert SAID[change] in str(error)
            if change not in ("set", "sparse"):
                assert "the output of stage 1 is not what stage 2 expects" in str(error)
            assert error.seconds < SOON


def test_a_wrong_value_in_the_middle_microbatch(workers):
    check_odd_values(workers.run(odd_values_in_processes, ranks=3))


def test_a_wrong_value_in_the_middle_microbatch_in_threads():
    for change in CHANGES:

        def worker(transport, change=change):
            return odd_values(
                transport.rank,
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, transport=transport),
                [change],
            )[0]

        errors = run_in_threads(worker, 3, timeout=60)
        # A rank that comes late to the step is told that it was over before.
        told = {str(error).removeprefix("the pipeline has failed and must be rebuilt; the cause: ") for error in errors}
        assert len(told) == 1
        assert SAID[change] in told.pop()


class Nan(Faulty):
    def forward(self, x, number=-1):
        out = super().forward(x, number)
        return out * float("nan") if number == 1 else out


def with_nan(rank, make):
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=MICROBATCHES)
    modules = {index: (Nan if index == 1 else Faulty)(index) for index in schedule.placement.stages_of(rank)}
    losses = []
    with make(modules, schedule) as pipe:
        for _ in range(2):
            out = call(pipe, losses=losses)
        finite = [bool(torch.isfinite(module.weight.grad).all()) for module in modules.values()]
    return [bool(loss.isnan()) for loss in losses], out, finite


def with_nan_in_processes(rank, ranks, *, group):
    return with_nan(rank, lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=20))


def test_nan_goes_through(workers):
    """Nothing fails, as in the unsplit model: the loss of that microbatch tells, and so does every gradient."""
    results = workers.run(with_nan_in_processes, ranks=2)
    results.append(
        run_in_threads(
            lambda transport: with_nan(
                transport.rank,
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, transport=transport),
            ),
            2,
            timeout=60,
        )[0]
    )
    for losses, out, _ in (results[0], results[2]):
        assert losses == [False, True, False] * 2
        assert out.isnan().all(1).tolist() == [False, False, True, True, False, False]
    assert [finite for _, _, finite in results] == [[False, False]] * 3


# Garbage from a peer --------------------------------------------------------------------------------------------------


def sealed(begin):
    """A header with a right checksum of its own."""
    begin = begin[:508].ljust(508, b"\0")
    return begin + struct.pack("<I", zlib.crc32(begin))


def started(version, length):
    return struct.pack("<4sHI", b"PENS", version, length)


def header_of(meta):
    return bytes(wire_format.header_tensor(meta)[0].tolist())


GARBAGE = {
    "random": lambda data: random.Random(1).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "truncated": lambda data: data[:20].ljust(len(data), b"\0"),
    "short": lambda data: data[:20],
    "a flipped bit": lambda data: data[:30] + bytes([byte ^ 4 for byte in data[30:31]]) + data[31:],
    "another version": lambda data: sealed(started(9, 60) + data[10:]),
    "a longer length": lambda data: started(VERSION, 5000) + data[10:],
    "a huge length": lambda data: sealed(started(VERSION, 2**32 - 1) + data[10:]),
    "another length": lambda data: sealed(started(VERSION, 30) + data[10:]),
    "a huge tensor": lambda _: header_of(
        ValueSpec(TENSOR, (TensorSpec((2**31, 2**28), torch.float32, True, (2**28, 1)),))
    ),
}


class Wide(nn.Module):
    """Gives more bytes than a header has, so that one taken for the other would end a process."""

    def __init__(self, index):
        super().__init__()
        self.layer = nn.Linear(3, 600) if index == 0 else nn.Linear(600, 3)

    def forward(self, x):
        return self.layer(x)


def garbage_headers(rank, make, kinds):
    schedule = ps.build("1F1B", ranks=2, microbatches=MICROBATCHES)
    x, y = batch()
    found = []
    for kind in kinds:
        module = Wide(rank)
        pipe = make({rank: module}, schedule)
        step = partial(pipe.step, *([x] if rank == 0 else []), target=y if rank else None)
        step()
        if rank == 0:
            send = pipe.transport.send

            def damaged(tensor, peer, tag, send=send, kind=kind):
                if tensor.dtype is torch.uint8:
                    data = bytearray(GARBAGE[kind](bytes(tensor.tolist())))
                    tensor = torch.frombuffer(data, dtype=torch.uint8)
                return send(tensor, peer, tag)

            pipe.transport.send = damaged
            pipe._engine.programs.clear()
        found.append(error_of(step))
        assert all(parameter.grad is None for parameter in module.parameters())
        pipe.close()
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def garbage_headers_in_processes(rank, ranks, *, group):
    return garbage_headers(
        rank,
        lambda modules, schedule: Pipeline(
            modules, schedule, loss_fn=mse, group=group, shapes="per_microbatch", timeout=20
        ),
        GARBAGE,
    )


def test_garbage_in_place_of_a_header(workers):
    results = workers.run(garbage_headers_in_processes, ranks=2)
    for errors, kind in zip(zip(*[found for found, _ in results], strict=True), GARBAGE, strict=True):
        assert len({str(error) for error in errors}) == 1
        assert isinstance(errors[0], StepError)
        assert (errors[0].rank, errors[0].action) == (1, "1F0")
        if kind != "a huge tensor":
            assert "could not decode the header that stage 0 sent to stage 1: " in str(errors[0]), kind
        assert max(error.seconds for error in errors) < SOON
    assert max(memory for _, memory in results) < 4_000_000  # kB; a hundred times that was announced


def test_garbage_in_place_of_a_header_in_threads():
    for kind in GARBAGE:
        if kind == "short":
            continue  # a receive of another size is refused here: see the tests of the transport

        def worker(transport, kind=kind):
            return garbage_headers(
                transport.rank,
                lambda modules, schedule: Pipeline(
                    modules, schedule, loss_fn=mse, transport=transport, shapes="per_microbatch"
                ),
                [kind],
            )[0][0]

        errors = run_in_threads(worker, 2, timeout=60)
        assert all(isinstance(error, StepError) for error in errors)
        assert "1F0" in str(errors[0]) or "1RECV_F0" in str(errors[0])


def with_numbers(data, change):
    """An announcement whose first part, numbers, is changed."""
    first, *rest = split_parts(data)
    return join_parts([encode_numbers(change(decode_numbers(first))), *rest])


ANNOUNCEMENTS = {
    "random": lambda data: random.Random(1).randbytes(50),
    "nothing": lambda data: b"",
    "cut off": lambda data: data[:-3],
    "a huge length": lambda data: data[:6] + b"\xff\xff\xff\x7f" + data[10:],
    "a flipped bit": lambda data: data[:30] + bytes([byte ^ 4 for byte in data[30:31]]) + data[31:],
    "another magic": lambda data: b"SNEP" + data[4:],
    "another version": lambda data: data[:4] + b"\2\0" + data[6:],
    "no parts": lambda data: join_parts([]),
    "fewer microbatches": lambda data: with_numbers(data, lambda numbers: numbers[1:]),
    "an unknown kind": lambda data: with_numbers(data, lambda numbers: (7, *numbers[1:])),
}


EXAMPLES = dict.fromkeys(range(2), torch.empty(2, 3))


def garbage_announcements(rank, make, kinds, modes=("inferred", EXAMPLES)):
    """Damage what ranks announce when they agree on shapes, by a dry run or by examples."""
    schedule = ps.build("1F1B", ranks=3, microbatches=MICROBATCHES)
    found = []
    for kind in kinds:
        for shapes in modes:
            pipe = make({rank: Faulty(rank)}, schedule, shapes)
            if rank == 0 and shapes == "inferred":
                send = pipe.transport.send_bytes
                pipe.transport.send_bytes = lambda peer, data, send=send, kind=kind: send(
                    peer, ANNOUNCEMENTS[kind](data)
                )
            elif rank == 0:
                exchange = pipe.transport.exchange
                pipe.transport.exchange = lambda data, exchange=exchange, kind=kind: exchange(ANNOUNCEMENTS[kind](data))
            found.append(error_of(lambda pipe=pipe: call(pipe)))
            pipe.close()
    return found


def garbage_announcements_in_processes(rank, ranks, *, group):
    return garbage_announcements(
        rank,
        lambda modules, schedule, shapes: Pipeline(
            modules, schedule, loss_fn=mse, group=group, shapes=shapes, timeout=20
        ),
        ANNOUNCEMENTS,
    )


def check_garbage_announcements(results, kinds):
    for number, (kind, inferred) in enumerate(itertools.product(kinds, [True, False])):
        errors = [found[number] for found in results]
        if not inferred and kind == "an unknown kind":
            continue  # there, the number is that of the first stage that is trained
        text = "stage 1 cannot use the shapes that stage 0 announced: " if inferred else "'s example shapes: "
        assert all(isinstance(error, PenstockError) and text in str(error) for error in errors), (kind, errors)
        assert max(error.seconds for error in errors) < SOON


def test_garbage_where_shapes_are_agreed(workers):
    check_garbage_announcements(workers.run(garbage_announcements_in_processes, ranks=3), list(ANNOUNCEMENTS))


def test_garbage_where_shapes_are_agreed_in_threads():
    for kind in ANNOUNCEMENTS:

        def worker(transport, kind=kind):
            return garbage_announcements(
                transport.rank,
                lambda modules, schedule, shapes: Pipeline(
                    modules, schedule, loss_fn=mse, transport=transport, shapes=shapes
                ),
                [kind],
                ["inferred"],
            )

        results = run_in_threads(worker, 3, timeout=60)
        assert all("stage 1 cannot use the shapes that stage 0 announced: " in str(error) for (error,) in results)


# Errors in every other place ------------------------------------------------------------------------------------------


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("no words")


class Raising(Faulty):
    """Raises what it is told to, in a real forward or already in the dry run."""

    def __init__(self, index, error=None, dry=False):
        super().__init__(index)
        self.error, self.dry = error, dry
        self.calls = 0

    def forward(self, x, number=-1):
        self.calls += 1
        if self.error is not None and (self.dry or self.calls == 3):
            raise self.error
        return super().forward(x, number)


def wrong_loss(output, target):
    raise InjectedError("in the loss")


def wrong_builder():
    raise InjectedError("in dw_builder")


def wrong_weights():
    def weights():
        raise InjectedError("in the weights")

    return weights


def wrong_function(action, context):
    if str(action).endswith("1"):
        raise InjectedError(f"in a function for {action}")
    context.run(action)


class Wrapped(TwoTensor):
    """A kind of tensor that cannot be sent between stages."""


#: For each: on which rank of two it happens, and what all ranks say.
PLACES = {
    "dry run": (0, "stage 0 failed in the dry run that finds shapes, with inputs float32[2, 3]: KeyError: 'dry'"),
    "dry run of the last but one": (1, "stage 1 failed in the dry run that finds shapes, with inputs float32[2, 3]"),
    "batch": (0, "cannot be split into 3 microbatches"),
    "no batch": (0, "rank 0 has the first stage; call step with its arguments"),
    "target": (1, "target"),
    "loss_fn": (1, "rank 1 failed in 3F0 (stage 3, microbatch 0; inputs float32[2, 3]): InjectedError: in the loss"),
    "dw_builder": (
        0,
        "rank 0 failed in 2I0 (stage 2, microbatch 0; gradients float32[2, 3]): InjectedError: in dw_builder",
    ),
    "weights": (0, "rank 0 failed in 2W0 (stage 2, microbatch 0): InjectedError: in the weights"),
    "function": (1, "InjectedError: in a function for 1SEND_F1"),
    "interrupt": (0, "rank 0 failed in 0F1 (stage 0, microbatch 1; inputs float32[2, 3]): KeyboardInterrupt: no mess"),
    "exit": (0, "rank 0 failed in 0F1 (stage 0, microbatch 1; inputs float32[2, 3]): SystemExit: 3"),
    "unspeakable": (0, "UnspeakableError: its message cannot be shown (ValueError)"),
    "long": (0, "inputs float32[2, 3]): ValueError: xxx"),
    "memory": (0, "OutOfMemoryError: no room"),
}


def fail_at(rank, place, make):
    """One mistake, on one rank."""
    schedule = ps.build("InterleavedZeroBubble", ranks=2, microbatches=MICROBATCHES)
    here = rank == PLACES[place][0]
    raised = {
        "interrupt": KeyboardInterrupt(),
        "exit": SystemExit(3),
        "unspeakable": UnspeakableError(),
        "long": ValueError("x" * 100_000),
        "memory": torch.OutOfMemoryError("no room"),
        "dry run": KeyError("dry"),
        "dry run of the last but one": KeyError("dry"),
    }
    stages = []
    for index in schedule.placement.stages_of(rank):
        error = raised.get(place) if here and index < 2 else None
        builder = {"dw_builder": wrong_builder, "weights": wrong_weights}.get(place) if here and index > 1 else None
        stages.append(Stage(index, Raising(index, error, place.startswith("dry")), dw_builder=builder))
    pipe = make(stages, schedule, wrong_loss if place == "loss_fn" else mse)
    if place == "function" and here:
        pipe.register_custom_function(ComputationType.SEND_F, wrong_function)
    x, y = batch()
    args = [] if rank or place == "no batch" else [x[:2] if place == "batch" else x]
    target = y[:2] if place == "target" else y
    try:
        return error_of(lambda: pipe.step(*args, target=target if rank else None))
    finally:
        assert all(stage.module.weight.grad is None for stage in stages)
        pipe.close()


def fail_in_every_place(rank, ranks, *, group):
    return [
        fail_at(
            rank,
            place,
            lambda stages, schedule, loss_fn: Pipeline(stages, schedule, loss_fn=loss_fn, group=group, timeout=20),
        )
        for place in PLACES
    ]


def check_place(place, errors):
    rank, text = PLACES[place]
    for here, error in enumerate(errors):
        if place in ("interrupt", "exit") and here == rank:
            assert isinstance(error, KeyboardInterrupt if place == "interrupt" else SystemExit)
            continue
        assert isinstance(error, PenstockError), (place, error)
        assert text in str(error), (place, str(error))
        assert here == rank or (isinstance(error, StepError) and error.rank == rank)
        assert error.seconds < SOON
        # One error, and the place of it; nothing of the backend.
        assert "gloo" not in error.printed
        assert here == rank or error.printed.count("direct cause") <= error.remote_traceback.count("direct cause")


def test_errors_in_every_place(workers):
    for place, errors in zip(PLACES, zip(*workers.run(fail_in_every_place, ranks=2), strict=True), strict=True):
        check_place(place, errors)


@pytest.mark.parametrize("place", PLACES)
def test_errors_in_every_place_in_threads(place):
    def worker(transport):
        return fail_at(
            transport.rank,
            place,
            lambda stages, schedule, loss_fn: Pipeline(stages, schedule, loss_fn=loss_fn, transport=transport),
        )

    check_place(place, run_in_threads(worker, 2, timeout=60))


def test_any_kind_of_tensor_can_be_told_of():
    class Stop(nn.Module):
        def forward(self, x):
            raise InjectedError("here")

    pipe = Pipeline({0: Stop()}, ps.build("GPipe", ranks=1, microbatches=1), loss_fn=mse)
    with pytest.raises(StepError, match=r"0F0 \(stage 0, microbatch 0; inputs float32\[2, 3\]\): InjectedError: here"):
        pipe.step(Microbatches([Wrapped(torch.ones(2, 3), torch.ones(2, 3))]), target=Microbatches([None]))


def test_inputs_of_an_action_whose_error_was_caught_are_not_shown_for_another():
    def catch(action, context):
        if action.microbatch_index == 1:
            raise ValueError("later")
        with contextlib.suppress(InjectedError):
            context.run(action)

    module = Raising(0, InjectedError("caught"), dry=True)
    pipe = Pipeline({0: module}, ps.build("GPipe", ranks=1, microbatches=2), loss_fn=mse)
    pipe.register_custom_function(ComputationType.FORWARD, catch)
    with pytest.raises(StepError, match=r"0F1 \(stage 0, microbatch 1\): ValueError: later"):
        pipe.eval(torch.ones(2, 3))


# Ranks that do not do the same ----------------------------------------------------------------------------------------

#: What rank 1 does, and what all ranks then say.
DIFFERENT = {
    "schedule": r"rank \d was given a different schedule from rank \d: '\w+, 3 ranks, 3 stages, 3 microbatches, \d+",
    "microbatches": r"a different schedule from rank \d: '\w+, 3 ranks, 3 stages, \d microbatches",
    "stages": r"rank 1 must be given stages \[1\], not \[1, 2\]",
    "shapes": r"rank \d was given a different kind of shapes from rank \d: '\w+' there, '\w+' here",
    "share_losses": r"rank \d was given a different share_losses from rank \d: '\w+' there",
    "interrupted": r"rank 1 failed: KeyboardInterrupt: no message",
    "missing": r"not every rank has created its Pipeline: rank \d waited \d s for a message from rank 1;",
    "late": r"not every rank has created its Pipeline: rank \d waited \d s for a message from rank 1;",
}


class Interrupted(dict):
    def items(self):
        raise KeyboardInterrupt


def differently(rank, ranks, *, group):
    found = []
    for what in DIFFERENT:
        schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
        options = {"loss_fn": mse, "group": group, "timeout": 1.0 if what in ("missing", "late") else 20.0}
        stages = {rank: Faulty(rank)}
        if rank == 1:
            if what == "missing":
                found.append(None)
                dist.barrier(group)
                continue
            if what == "late":
                time.sleep(4)
            schedule = {
                "schedule": ps.build("GPipe", ranks=ranks, microbatches=MICROBATCHES),
                "microbatches": ps.build("1F1B", ranks=ranks, microbatches=4),
            }.get(what, schedule)
            stages = {"stages": {1: Faulty(1), 2: Faulty(2)}, "interrupted": Interrupted(stages)}.get(what, stages)
            options |= {"shapes": {"shapes": "per_microbatch"}, "share_losses": {"share_losses": True}}.get(what, {})
        found.append(error_of(partial(Pipeline, stages, schedule, **options)))
        dist.barrier(group)
    return found, threads()[0]


@pytest.mark.processes
def test_constructors_that_do_not_fit():
    with Workers(3) as pool:
        results = pool.run(differently, fresh=True)
    for what, errors in zip(DIFFERENT, zip(*[found for found, _ in results], strict=True), strict=True):
        for here, error in enumerate(errors):
            if here == 1 and what in ("missing", "interrupted"):
                assert error is None or isinstance(error, KeyboardInterrupt)
                continue
            assert isinstance(error, PenstockError), (what, error)
            assert re.search(DIFFERENT[what], str(error)), (what, str(error))
            assert error.seconds < SOON
    assert [ours for _, ours in results] == [0, 0, 0]


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


def one_evaluates(rank, make, shapes):
    """One rank trains, the other one evaluates."""
    pipe = make({rank: Wide(rank)}, ps.build("1F1B", ranks=2, microbatches=MICROBATCHES), shapes)
    x, y = batch()
    pipe.step(*([] if rank else [x]), target=y if rank else None)
    try:
        return error_of((lambda: pipe.eval(target=y)) if rank else (lambda: pipe.step(x)))
    finally:
        pipe.close()


def one_evaluates_in_processes(rank, ranks, *, group):
    return [
        one_evaluates(
            rank,
            lambda modules, schedule, shapes: Pipeline(
                modules, schedule, loss_fn=mse, group=group, shapes=shapes, timeout=1.0
            ),
            shapes,
        )
        for shapes in ("inferred", "per_microbatch")
    ]


def test_one_rank_evaluates_while_the_other_trains(workers):
    for errors in workers.run(one_evaluates_in_processes, ranks=2):
        for error in errors:
            assert isinstance(error, StepError)
            assert re.search(r"rank \d waits in .* for rank \d.*no progress for", str(error)), str(error)
            assert error.seconds < SOON


def test_one_rank_evaluates_while_the_other_trains_in_threads():
    for shapes in ("inferred", "per_microbatch"):

        def worker(transport, shapes=shapes):
            return one_evaluates(
                transport.rank,
                lambda modules, schedule, shapes: Pipeline(
                    modules, schedule, loss_fn=mse, transport=transport, shapes=shapes
                ),
                shapes,
            )

        assert all("waits in" in str(error) for error in run_in_threads(worker, 2, timeout=60))
