import threading
import time

import pytest
import torch

from penstock.errors import MetadataError, StepError, TransportError
from penstock.graph.comm_model import CommModel
from penstock.runtime.transport.connecting import post_byte_each_way
from penstock.runtime.transport.process_groups import as_bytes
from penstock.runtime.transport.protocol import Failure, Transport
from penstock.runtime.transport.threads import ThreadTransport, run_in_threads, thread_transports

RENDEZVOUS = CommModel("rendezvous", "message")


@pytest.fixture(autouse=True)
def _no_thread_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def at(transport: ThreadTransport, label: str) -> None:
    """Set where this rank is, as a program does."""
    transport.progress.labels = (label,)
    transport.progress.index = 0


def test_it_is_a_transport():
    transport: Transport = thread_transports(1)[0]
    assert (transport.rank, transport.ranks, transport.model) == (0, 1, CommModel())


@pytest.mark.parametrize("buffering", ["rendezvous", "bounded(2)", "eager"])
def test_when_a_tensor_is_copied(buffering):
    """A buffered send copies when it is posted; an unbuffered one when it meets its receive."""

    def worker(transport):
        if transport.rank == 0:
            tensor = torch.ones(2, requires_grad=True)
            posted = transport.send(tensor, 1, 5)
            with torch.no_grad():
                tensor.fill_(2)
            transport.send_bytes(1, b"changed")
            posted.wait()
            return None
        transport.receive_bytes(0)
        tensor = torch.zeros(2)
        transport.receive(tensor, 0, 5).wait()
        return tensor.tolist()

    model = CommModel(buffering, "message")
    assert run_in_threads(worker, 2, model=model)[1] == ([2, 2] if buffering == "rendezvous" else [1, 1])


def test_messages_of_one_tag_keep_their_order():
    def worker(transport):
        tensors = [torch.full((1,), float(number)) for number in range(5)]
        post = transport.send if transport.rank == 0 else transport.receive
        for posted in [post(tensor, 1 - transport.rank, 3) for tensor in tensors]:
            posted.wait()
        return [tensor.item() for tensor in tensors]

    for buffering in ("rendezvous", "eager"):
        assert run_in_threads(worker, 2, model=CommModel(buffering, "message"))[1] == [0, 1, 2, 3, 4]


def test_inference_tensors():
    def worker(transport):
        with torch.inference_mode(transport.rank == 1):
            tensor = torch.full((1,), float(transport.rank))
            other = torch.zeros(1)
            posted = [transport.send(tensor, 1 - transport.rank, 0), transport.receive(other, 1 - transport.rank, 0)]
            for one in posted:
                one.wait()
            return other.item()

    for buffering in ("rendezvous", "eager"):
        assert run_in_threads(worker, 2, model=CommModel(buffering, "message")) == [1, 0]


def test_bytes_and_rounds():
    def worker(transport):
        transport.connect([(0, 1), (1, 2)])
        rounds = [transport.exchange(b"%d.%d" % (transport.rank, number)) for number in range(3)]
        following, before = (transport.rank + 1) % 3, (transport.rank - 1) % 3
        transport.send_bytes(following, b"first")
        transport.send_bytes(following, b"")
        return rounds, transport.receive_bytes(before), transport.receive_bytes(before)

    for rounds, first, second in run_in_threads(worker, 3):
        assert rounds == [[b"%d.%d" % (rank, number) for rank in range(3)] for number in range(3)]
        assert (first, second) == (b"first", b"")


def announcements(transport):
    """Two of the ranks announce; messages between the two, and exchanges of all, do not disturb that."""
    rank, members, seen = transport.rank, [0, 2], []
    for number in range(3):
        transport.exchange(b"")
        if rank == 0:
            announced = transport.announce("topic", b"0.%d" % number, members)
            transport.send_bytes(2, b"plain")
            seen.append(announced.known())
        transport.exchange(b"")
        if rank == 2:
            announced = transport.announce("topic", b"2.%d" % number, members)
            assert transport.receive_bytes(0) == b"plain"
            seen.append(announced.known())
        if rank in members:
            assert announced.collect() == announced.known() == [b"0.%d" % number, b"2.%d" % number]
            other = transport.announce("another topic", b"%d" % rank, members)
            assert transport.announce("a third", b"", [rank]).collect() == [b""]
            assert other.collect() == [b"0", b"2"]
    return seen


def test_announcements():
    zero, none, two = run_in_threads(announcements, 3, timeout=20)
    assert zero == [[b"0.%d" % number, None] for number in range(3)]
    assert none == []
    assert two == [[b"0.%d" % number, b"2.%d" % number] for number in range(3)]


def test_a_deadlock_is_described():
    def worker(transport):
        at(transport, f"{transport.rank}RECV_F1")
        transport.receive(torch.zeros(1), (transport.rank + 1) % 3, 0).wait()

    began = time.monotonic()
    with pytest.raises(StepError) as caught:
        run_in_threads(worker, 3, timeout=20)
    assert time.monotonic() - began < 5
    assert str(caught.value) == (
        "deadlock: rank 0 waits in 0RECV_F1 for rank 1, which waits in 1RECV_F1 for rank 2, which waits in 2RECV_F1"
        " for rank 0 (under rendezvous, a lane per pair)"
    )
    assert (caught.value.rank, caught.value.action) == (0, "0RECV_F1")


def test_a_deadlock_through_the_heads_of_lanes():
    def worker(transport):
        peer = 1 - transport.rank
        at(transport, f"{transport.rank}SEND_F0")
        transport.send(torch.zeros(1), peer, 0)
        at(transport, f"{transport.rank}RECV_F0")
        transport.receive(torch.zeros(1), peer, 0).wait()

    with pytest.raises(StepError) as caught:
        run_in_threads(worker, 2, timeout=20)
    assert str(caught.value).startswith(
        "deadlock: rank 0 waits in 0SEND_F0, ahead of 0RECV_F0, for rank 1,"
        " which waits in 1SEND_F0, ahead of 1RECV_F0, for rank 0 (under"
    )
    assert run_in_threads(worker, 2, model=CommModel("bounded(1)", "pair")) == [None, None]


def test_a_full_lane_is_described():
    def worker(transport):
        peer = 1 - transport.rank
        for number in range(2):
            at(transport, f"{transport.rank}SEND_F{number}")
            posted = transport.send(torch.zeros(1), peer, number)
        posted.wait()

    with pytest.raises(StepError, match=r"rank 0 waits in 0SEND_F1 \(its lane is full\) for rank 1, which waits in"):
        run_in_threads(worker, 2, model=CommModel("bounded(1)", "direction"), timeout=20)


@pytest.mark.parametrize("lanes", ["rank", "pair", "direction", "message"])
def test_ranks_connect_without_a_deadlock(lanes):
    """Post what the distributed transport posts in connect, where nothing is buffered."""
    pairs = [(first, second) for second in range(4) for first in range(second)]

    def worker(transport):
        for pair in pairs:
            if transport.rank in pair:
                peer = sum(pair) - transport.rank
                at(transport, f"{pair}")
                posted = post_byte_each_way(transport.send, transport.receive, torch.zeros(1), transport.rank, peer)
                for one in posted:
                    one.wait()

    assert run_in_threads(worker, 4, model=CommModel("rendezvous", lanes), timeout=20) == [None] * 4


def test_tensors_go_as_bytes_where_a_backend_may_not_support_them():
    posted = []
    post = as_bytes(lambda tensors, peer, tag: posted.append((tensors[0].dtype, peer, tag)), frozenset({torch.half}))
    for tag, dtype in enumerate([torch.half, torch.complex64, torch.bool, torch.int16, torch.uint8]):
        post([torch.zeros((), dtype=dtype)], 3, tag)
    assert posted == [(torch.half, 3, 0), *((torch.uint8, 3, tag) for tag in range(1, 5))]


@pytest.mark.parametrize("what", ["receive", "receive_bytes", "announce", "exchange"])
def test_waiting_for_a_rank_that_has_finished(what):
    def worker(transport):
        if transport.rank == 0:
            return
        at(transport, "1F0")
        if what == "receive":
            transport.receive(torch.zeros(1), 0, 0).wait()
        elif what == "receive_bytes":
            transport.receive_bytes(0)
        elif what == "announce":
            transport.announce("topic", b"", [0, 1]).collect()
        else:
            transport.exchange(b"")

    with pytest.raises(
        StepError, match="rank 1 waits in 1F0 for rank 0, which has finished; all ranks must run the same steps"
    ):
        run_in_threads(worker, 2, timeout=20)


@pytest.mark.parametrize("buffering", ["rendezvous", "eager"])
@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6)])
def test_a_tensor_that_does_not_fit_is_not_received(buffering, other):
    def worker(transport):
        if transport.rank == 0:
            transport.send(torch.ones(2, 3), 1, 7).wait()
        else:
            at(transport, "1RECV_F0")
            transport.receive(other, 0, 7).wait()

    with pytest.raises(
        MetadataError, match=r"rank 0 sent float32\[2, 3\], but rank 1 expects float\d\d\[.*\] in 1RECV_F0"
    ):
        run_in_threads(worker, 2, model=CommModel(buffering, "pair"), timeout=20)
    assert not other.any()


@pytest.mark.parametrize("what", ["send", "receive", "receive_bytes", "announce", "exchange", "compute"])
def test_an_error_ends_all_waits(what):
    errors = []

    def compute(transport):
        while transport.failure() is None:
            time.sleep(0.01)
        transport.send(torch.zeros(1), 1 - transport.rank, 0)

    wait = {
        "send": lambda transport: transport.send(torch.zeros(1), 2, 0).wait(),
        "receive": lambda transport: transport.receive(torch.zeros(1), 2, 0).wait(),
        "receive_bytes": lambda transport: transport.receive_bytes(2),
        "announce": lambda transport: transport.announce("topic", b"", [0, 1, 2]).collect(),
        "exchange": lambda transport: transport.exchange(b""),
        "compute": compute,
    }

    def worker(transport):
        if transport.rank == 2:
            time.sleep(0.05)
            raise KeyError("a mistake")
        try:
            wait[what](transport)
        except StepError as error:
            errors.append((str(error), transport.explain(error)))
            raise

    with pytest.raises(KeyError, match="a mistake"):
        run_in_threads(worker, 3, timeout=20)
    assert len(errors) == 2
    for text, failure in errors:
        assert "rank 2 raised KeyError: 'a mistake'" in text
        assert failure.rank == 2
        assert "in worker" in failure.traceback


def test_the_first_failure_wins_and_later_calls_raise_it():
    first, second = thread_transports(2)
    failure = Failure(1, "no luck", "1F0", 1, 0)
    assert second.fail(failure) is failure
    assert first.fail(Failure(0, "late")) is failure
    assert first.failure() is failure
    for call in (
        lambda: first.send(torch.zeros(1), 1, 0),
        lambda: first.exchange(b""),
        lambda: second.receive_bytes(0),
    ):
        with pytest.raises(StepError, match="must be rebuilt; the cause: no luck") as caught:
            call()
        assert (caught.value.action, caught.value.stage, caught.value.microbatch) == ("1F0", 1, 0)
    assert first.explain(ValueError("mine")) is None


def test_a_rank_that_does_not_finish_is_named():
    release = threading.Event()

    def worker(transport):
        if transport.rank == 1:
            at(transport, "1F4")
            release.wait(10)
        else:
            transport.receive_bytes(1)

    with pytest.raises(
        TransportError, match=r"not finished within 0.1 s: rank 0 is in its own code, rank 1 is in 1F4; .* rank 1"
    ):
        run_in_threads(worker, 2, timeout=0.1)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "rank 1":
            thread.join(5)


def test_unknown_peers():
    transport = thread_transports(2)[0]
    for call in (
        lambda: transport.send(torch.zeros(1), 2, 0),
        lambda: transport.receive_bytes(-1),
        lambda: transport.connect([(0, 5)]),
    ):
        with pytest.raises(TransportError, match="unknown rank"):
            call()


def test_closing_twice():
    transport = thread_transports(1)[0]
    transport.close()
    transport.close()
    with pytest.raises(StepError, match="is closed"):
        transport.exchange(b"")


def test_backward_runs_in_every_thread():
    def worker(transport):
        weight = torch.ones(3, requires_grad=True)
        (weight * transport.rank).sum().backward()
        return weight.grad.sum().item()

    assert run_in_threads(worker, 4, model=RENDEZVOUS) == [0, 3, 6, 9]
