"""The transport on real processes. One launch makes many checks, and shows the stacks if it exceeds its limit."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock.errors import PenstockError, StepError, TransportError
from penstock.execution.wire_format import DTYPES
from penstock.graph.comm_model import CommModel
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.protocol import Failure, Transport
from runtime.workers import Ended, Workers

pytestmark = pytest.mark.processes

#: How many seconds a failure may take to reach every rank.
SOON = 5.0
ALL_PAIRS = [(first, second) for second in range(4) for first in range(second)]


def in_step(transport, label, peer):
    """Set where this rank is, as a program does."""
    transport.progress.labels, transport.progress.peers = (label,), (peer,)
    transport.progress.step += 1
    transport.progress.index = 0


def outcome(transport, action):
    """Handle an error as the runtime does when an action raises; returns the failure, and how long it took."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        failure = transport.explain(error)
        if failure is None:
            raise
        return transport.fail(failure), time.monotonic() - began
    return None, time.monotonic() - began


def compute(transport, seconds):
    """Compute until the time is over, or until a failure is known, which the next call raises."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        if transport._failure is not None:
            transport.send(torch.zeros(1), 1 - min(1, transport.rank), 0).wait()


def failure_of(transport):
    """Wait for a reported failure."""
    end = time.monotonic() + SOON
    while (failure := transport.failure()) is None and time.monotonic() < end:
        time.sleep(0.05)
    return failure


def check_dead(transport):
    """Check that every call raises the failure at once."""
    began = time.monotonic()
    for call in (
        lambda: transport.send(torch.zeros(1), 0, 0),
        lambda: transport.receive(torch.zeros(1), 0, 0),
        lambda: transport.exchange(b""),
        lambda: transport.send_bytes(0, b""),
        lambda: transport.receive_bytes(0),
        lambda: transport.connect([(0, 1)]) if transport.rank < 2 else transport.receive_bytes(0),
    ):
        with pytest.raises(StepError, match="must be rebuilt"):
            call()
    assert time.monotonic() - began < SOON


# Messages -----------------------------------------------------------------------------------------------------------


def messages(rank, ranks, *, group):
    transport = DistributedTransport(group, timeout=20)
    typed: Transport = transport
    assert typed.model == CommModel("rendezvous", "message")
    assert (transport.rank, transport.ranks) == (rank, ranks)
    transport.connect([pair for pair in ALL_PAIRS if max(pair) < ranks])
    out_of_order(transport)
    beside_another(transport, group)
    in_many_forms(transport)
    bytes_and_rounds(transport)
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="is closed"):
        transport.send(torch.zeros(1), 0, 0)
    with pytest.raises(TransportError, match="is closed"):
        transport.exchange(b"")
    forgotten(group)
    return [thread.name for thread in threading.enumerate() if "penstock" in thread.name]


def out_of_order(transport):
    """Messages are matched by tag: posted and waited for in different orders, small and large."""
    following, before = (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks
    sizes = [1, 1_000_000, 3, 2_000_000, 0, 5]
    received = {tag: torch.zeros(size) for tag, size in enumerate(sizes)}
    sent = [transport.send(torch.full((size,), float(tag)), following, tag) for tag, size in enumerate(sizes)]
    pending = {tag: transport.receive(received[tag], before, tag) for tag in (3, 0, 5, 4, 2, 1)}
    for tag in (5, 0, 1, 4, 3, 2):
        pending[tag].wait()
        assert (received[tag] == tag).all()
    for work in reversed(sent):
        work.wait()


def beside_another(transport, group):
    """Two transports do not share tags."""
    other = DistributedTransport(group, timeout=20)
    following, before = (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks
    first, second = torch.zeros(1), torch.zeros(1)
    works = [
        other.send(torch.tensor([2.0]), following, 0),
        transport.send(torch.tensor([1.0]), following, 0),
        transport.receive(first, before, 0),
        other.receive(second, before, 0),
    ]
    for work in works:
        work.wait()
    assert (first.item(), second.item()) == (1, 2)
    other.close()


def in_many_forms(transport):
    """Tensors of every type, without dimensions or elements, with a gradient; but not a non-contiguous one."""
    following, before = (transport.rank + 1) % transport.ranks, (transport.rank - 1) % transport.ranks
    bits = torch.tensor([0, 1] * 16, dtype=torch.uint8)
    tensors = [bits.view(dtype).reshape(2, -1) for dtype in DTYPES]
    tensors += [tensor[0, 0] for tensor in tensors]
    tensors += [torch.zeros(2, 0), torch.arange(6.0, requires_grad=True)]
    for tag, tensor in enumerate(tensors):
        received = torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        works = [transport.send(tensor, following, tag), transport.receive(received, before, tag)]
        for work in works:
            work.wait()
        assert raw(received) == raw(tensor)
    turned = torch.arange(12.0).reshape(3, 4).t()
    with pytest.raises(TransportError, match=r"must be contiguous; this one has strides \[1, 4\]"):
        transport.send(turned, following, 0)
    with pytest.raises((ValueError, RuntimeError)):  # from the backend, or from the view as bytes
        transport.receive(turned, before, 0)


def raw(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).tolist()


def bytes_and_rounds(transport):
    """Messages arrive in order, and nothing is left in the store."""
    rank, ranks = transport.rank, transport.ranks
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    kept = []
    for number in range(20):
        given = transport.exchange(b"%d/%d" % (rank, number))
        assert given == [b"%d/%d" % (other, number) for other in range(ranks)]
        transport.send_bytes(following, b"first %d" % number)
        transport.send_bytes(following, b"")
        assert transport.receive_bytes(before) == b"first %d" % number
        assert transport.receive_bytes(before) == b""
        announced = transport.announce("topic", b"%d" % rank, range(ranks))
        assert announced.known()[rank] == b"%d" % rank
        transport.exchange(b"")
        assert announced.known() == announced.collect() == [b"%d" % other for other in range(ranks)]
        kept.append(transport._store.num_keys())
        transport.exchange(b"")
    assert max(kept) - min(kept) < 3 * ranks  # those in flight; a hundred keys per rank have been used


def forgotten(group):
    """A transport without references ends its thread."""
    transport = DistributedTransport(group, timeout=20)
    transport.exchange(b"")
    del transport
    gc.collect()


def test_messages(workers):
    assert workers.run(messages, ranks=3, limit=60) == [[], [], []]
    assert workers.run(messages, ranks=2, limit=60) == [[], []]


def two_by_two(rank, ranks):
    """Groups of some of the processes: only members create transports, and ranks are those in the group."""
    members = [[3, 0], [1, 2]]
    groups = [dist.new_group(ranks, sort_ranks=False) for ranks in members]
    mine = rank in members[1]
    with pytest.raises(TransportError, match="not a member of the given group"):
        DistributedTransport(groups[not mine])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # one rank has created more groups than the others
    transport = DistributedTransport(groups[mine], timeout=20)
    assert transport.rank == members[mine].index(rank)
    transport.connect([(0, 1)])
    assert transport.exchange(b"%d" % rank) == [b"%d" % member for member in members[mine]]
    out_of_order(transport)
    transport.close()
    for group in groups:
        dist.destroy_process_group(group)


def test_groups_of_some_processes(workers):
    workers.run(two_by_two, fresh=True)
    workers.close()  # one of them has one more group now


def gloo_by_another_name(store, rank, ranks, timeout):
    return dist.ProcessGroupGloo(store, rank, ranks, timeout)


def another_backend(rank, ranks):
    """An unknown backend: the stricter model, and a process group instead of a bare backend."""
    dist.Backend.register_backend("by_another_name", gloo_by_another_name, devices=["cpu"])
    group = dist.new_group(range(ranks), backend="by_another_name")
    transport = DistributedTransport(group, timeout=20)
    assert transport.model == CommModel("rendezvous", "pair")
    transport.connect([(0, 1), (1, 2)])
    out_of_order(transport)
    in_many_forms(transport)
    bytes_and_rounds(transport)
    transport.close()
    with pytest.raises(TransportError, match="has no backend for tensors on cuda:1, only cpu:by_another_name"):
        DistributedTransport(group, device=torch.device("cuda:1"))
    dist.destroy_process_group(group)


def one_for_each_device(rank, ranks):
    """A group with two backends: the device of the tensors decides which one is used."""
    dist.Backend.register_backend("by_another_name", gloo_by_another_name, devices=["cpu", "cuda"])
    group = dist.new_group(range(ranks), backend="cpu:gloo,cuda:by_another_name")
    transport = DistributedTransport(group, timeout=20, device=torch.device("cpu"))
    assert transport.model == CommModel("rendezvous", "message")
    transport.exchange(b"")  # no rank closes while another still connects
    transport.close()
    with pytest.raises(TransportError, match=r"rank 0: gloo, rank 1: by_another_name\); put all stages on"):
        DistributedTransport(group, timeout=20, device=torch.device(("cpu", "cuda:1")[rank]))
    dist.destroy_process_group(group)


def test_another_backend():
    with Workers(3) as pool:
        pool.run(another_backend)


def test_a_backend_for_each_device():
    with Workers(2) as pool:
        pool.run(one_for_each_device)


def alone(rank, ranks, *, group):
    transport = DistributedTransport(group)
    transport.connect([])
    assert transport.exchange(b"me") == [b"me"]
    failure = Failure(0, "no luck")
    assert transport.fail(failure) == failure
    transport.close()


def test_one_rank(workers):
    workers.run(alone, ranks=1)


# Failures -----------------------------------------------------------------------------------------------------------

FAILURE = Failure(1, "rank 1 raised ValueError: no luck", "1F2", 1, 2, "Traceback ...")


def one_reports(rank, ranks, others, *, group):
    transport = DistributedTransport(group, timeout=30)
    transport.connect(ALL_PAIRS)
    in_step(transport, f"{rank}F0", None if rank in (1, 3) else 1)
    transport.exchange(b"")
    if rank == 1:
        time.sleep(0.3)
        began = time.monotonic()
        assert transport.fail(FAILURE) == FAILURE
        failure, seconds = transport.fail(Failure(1, "late")), time.monotonic() - began
    else:
        failure, seconds = outcome(transport, ACTIONS[others[rank]](transport))
    assert failure == FAILURE
    assert seconds < SOON
    check_dead(transport)
    dist.barrier(group)  # the report ends the waits, not the closing of the others
    transport.close()
    return seconds


ACTIONS = {
    "send": lambda transport: lambda: transport.send(torch.zeros(1_000_000), 1, 0).wait(),
    "receive": lambda transport: lambda: transport.receive(torch.zeros(1), 1, 0).wait(),
    "exchange": lambda transport: lambda: transport.exchange(b""),
    "announce": lambda transport: lambda: transport.announce("topic", b"", range(transport.ranks)).collect(),
    "receive_bytes": lambda transport: lambda: transport.receive_bytes(1),
    "compute": lambda transport: lambda: compute(transport, 20),
    "connect": lambda transport: lambda: transport.connect([(1, transport.rank)]),
}


@pytest.mark.parametrize(
    "others",
    [
        ("send", "", "receive", "compute"),
        ("exchange", "", "receive_bytes", "announce"),
        ("connect", "", "receive_bytes", "send"),
    ],
)
def test_a_failure_ends_every_wait(workers, others):
    workers.run(one_reports, others, limit=40)


def without_a_name(rank, ranks, port, backend):
    """The group was created without the name of a backend; for CPU tensors it is gloo all the same."""
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    assert dist.get_backend() != "gloo"
    transport = DistributedTransport(timeout=30, device=torch.device("cpu"))
    assert transport.model == CommModel("rendezvous", "message")
    transport.exchange(b"")  # no rank closes while another still connects
    transport.close()
    return one_reports(rank, ranks, ("receive", "", "send", "receive"), group=None)


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_a_failure_in_a_group_without_a_backend_by_name(backend):
    with Workers(4) as pool:
        assert max(pool.run(without_a_name, free_port(), backend, limit=40)) < SOON


def fails_while_idle(rank, ranks, *, group):
    transport = DistributedTransport(group, timeout=30)
    transport.exchange(b"")
    if rank == 1:
        transport.fail(FAILURE)
    assert failure_of(transport) == FAILURE
    check_dead(transport)
    transport.close()


def test_an_idle_rank_learns_of_a_failure_at_its_next_call(workers):
    workers.run(fails_while_idle, ranks=2)


def garbage(rank, ranks, *, group):
    transport = DistributedTransport(group, timeout=30)
    in_step(transport, f"{rank}F0", 1)
    transport.exchange(b"")
    if rank == 1:
        transport._board._store.set("failure", b"\x80\x04garbage")
    failure, seconds = outcome(transport, lambda: transport.receive(torch.zeros(1), 1 - rank, 0).wait())
    assert "a rank reported a failure that could not be decoded (9 bytes: b'\\x80\\x04garbage')" in failure.message
    assert seconds < SOON
    transport.close()


def test_garbage_in_place_of_a_failure(workers):
    workers.run(garbage, ranks=2)


def stalls(rank, ranks, *, group):
    transport = DistributedTransport(group, timeout=2.5)
    in_step(transport, ("0RECV_F3", "1RECV_F3", "2F1")[rank], (1, 2, None)[rank])
    transport.exchange(b"")
    if rank == 2:
        failure, seconds = outcome(transport, lambda: compute(transport, 20))
    else:
        failure, seconds = outcome(transport, lambda: transport.receive(torch.zeros(1), rank + 1, 0).wait())
    transport.close()
    return failure.message, seconds


def test_a_rank_that_stalls(workers):
    results = workers.run(stalls, ranks=3, limit=30)
    (message,) = {message for message, _ in results}
    # Rank 0, which waits for rank 1, may be the first to report.
    assert re.search(r"rank 1(, which)? waits in 1RECV_F3 for rank 2, which has been in 2F1 for \d s", message)
    assert max(seconds for _, seconds in results) < 2.5 + SOON


def one_does_not_connect(rank, ranks, *, group):
    transport = DistributedTransport(group, timeout=1.0)
    transport.connect([(0, 1)])
    if rank == 1:
        assert "between rank 1 and rank 2 could not be established" in failure_of(transport).message
    elif rank == 2:
        with pytest.raises(
            TransportError, match="the connection between rank 1 and rank 2 could not be established"
        ) as caught:
            transport.connect([(0, 1), (1, 2)])
        assert caught.value.peer == 1
    else:
        with pytest.raises(PenstockError, match="between rank 1 and rank 2 could not be established"):
            transport.receive_bytes(2)
    transport.close()


def test_a_pair_that_cannot_connect_is_named(workers):
    workers.run(one_does_not_connect, ranks=3)


def one_is_missing(rank, ranks, *, group):
    if rank == 2:
        return
    with pytest.raises(TransportError, match="for a message from rank 2; rank 2 may hang") as caught:
        DistributedTransport(group, timeout=0.5)
    assert caught.value.peer == 2


def test_a_rank_that_does_not_create_its_transport_is_named(workers):
    workers.run(one_is_missing, ranks=3, fresh=True)


def own_mistakes(rank, ranks, *, group):
    transport = DistributedTransport(group, timeout=30)
    began = time.monotonic()
    assert transport.explain(ValueError("of the user")) is None
    assert transport.explain(RuntimeError("Connection refused by a database")) is None
    assert time.monotonic() - began < SOON
    transport.exchange(b"")
    transport.close()


def test_an_error_of_this_rank_alone(workers):
    workers.run(own_mistakes, ranks=2)
    with pytest.raises(TransportError, match=r"no process group is initialized; call .*init_process_group"):
        DistributedTransport()


# Processes that are killed ------------------------------------------------------------------------------------------


def one_is_killed(rank, ranks, victim, actions, *, group):
    transport = DistributedTransport(group, timeout=30)
    transport.connect(ALL_PAIRS)
    in_step(transport, f"{rank}RECV_F0", None if rank == 3 else victim)
    transport.exchange(b"")
    if rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    action = {
        "receive": lambda: transport.receive(torch.zeros(1), victim, 0).wait(),
        "send": lambda: transport.send(torch.zeros(1_000_000), victim, 0).wait(),
        "receive_bytes": lambda: transport.receive_bytes(victim),
        "late": lambda: [time.sleep(0.6), transport.send(torch.zeros(1), victim, 0).wait()],
    }[actions[rank]]
    failure, seconds = outcome(transport, action)
    check_dead(transport)
    transport.close()
    return failure, seconds


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank(workers, victim):
    actions = ["receive", "receive_bytes", "send", "late"]
    results = workers.run(one_is_killed, victim, actions, limit=40, deaths=True)
    assert results.pop(victim) == Ended(victim, -9)
    (failure,) = {failure for failure, _ in results}
    assert failure.rank == victim
    assert f"lost the connection to rank {victim} in" in failure.message
    assert "may have been killed" in failure.message
    assert max(seconds for _, seconds in results) < SOON


def the_host_of_the_store_is_killed(rank, ranks, port):
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    return one_is_not_waited_for(rank)


def one_is_not_waited_for(rank):
    """Rank 1 waits for rank 2, which waits for rank 3, which computes: no rank waits for the one that is killed."""
    transport = DistributedTransport(timeout=30)
    transport.connect(ALL_PAIRS)
    in_step(transport, f"{rank}F0", None if rank in (0, 3) else rank + 1)
    transport.exchange(b"")
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        failure, seconds = outcome(transport, lambda: compute(transport, 20))
    else:
        failure, seconds = outcome(transport, lambda: transport.receive(torch.zeros(1), rank + 1, 0).wait())
    check_dead(transport)
    transport.close()
    return failure, seconds


def test_the_host_of_the_store_is_killed():
    with Workers(4) as pool:
        results = pool.run(the_host_of_the_store_is_killed, free_port(), limit=40, deaths=True)
    assert results.pop(0) == Ended(0, -9)
    for failure, seconds in results:
        assert re.search(r"lost the store.*; .* may have been killed, or have exited after fewer", failure.message)
        assert seconds < SOON


# The end of a process -----------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from penstock.runtime.transport.distributed import DistributedTransport

torch.set_num_threads(1)
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
transports = [DistributedTransport(timeout=20) for _ in range(2)]
for transport in transports:
    transport.connect([(0, 1)])
    transport.progress.labels, transport.progress.index = ("F",), 0
    assert transport.exchange(b"%d" % rank) == [b"0", b"1"]
time.sleep(0.6)
for transport in transports:
    transport.exchange(b"")
    transport.progress.index = -1
transports[0].close()
time.sleep(rank * 1.5)  # rank 0, which may host the store, exits before
print("done")
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_processes_exit_silently(kind, tmp_path):
    """Even if a transport was not closed, or the store is already gone."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    method = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path / 'store'}"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(script), method, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs == [("done\n", ""), ("done\n", "")]
    assert [process.returncode for process in processes] == [0, 0]
