"""The real errors of stores and of gloo: these tests fail when torch changes a text or a behaviour that we rely on."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock.execution.backend_errors import is_connection_error, is_store_timeout, reason_of

SOON = 5.0


def error_of(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return caught.value


def stores(folder):
    yield dist.HashStore()
    yield dist.FileStore(str(folder / "store"), 1)
    yield dist.TCPStore("127.0.0.1", 0, is_master=True)
    yield dist.PrefixStore("prefix", dist.TCPStore("127.0.0.1", 0, is_master=True))


def test_a_key_that_does_not_come(tmp_path):
    for store in stores(tmp_path):
        error = error_of(lambda store=store: store.wait(["key"], timedelta(milliseconds=20)))
        assert is_store_timeout(error), (store, error)
        assert re.fullmatch(r"[Ww]ait timeout( after 20ms)?", reason_of(error))


def test_a_store_that_is_lost():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(error_of, lambda: store.wait(["key"], timedelta(seconds=SOON)))
        time.sleep(0.2)
        del host
        error = waiting.result()
    assert not is_store_timeout(error)
    assert is_connection_error(error)
    assert not is_store_timeout(error_of(lambda: store.check(["key"])))


@pytest.fixture
def pair():
    """Two ranks connected by gloo, in one process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=SOON)), range(2)))


def receive(group, tag):
    return group.recv([torch.zeros(1)], 1, tag)


def test_a_connection_that_the_peer_closes(pair):
    waiting = receive(pair[0], 1)
    pair.pop()
    for call in (waiting.wait, lambda: receive(pair[0], 2), lambda: pair[0].send([torch.zeros(1)], 1, 3)):
        error = error_of(call)
        assert is_connection_error(error)
        assert reason_of(error).startswith("Connection closed by peer [127.0.0.1]:")


def test_a_wait_that_times_out_ends_all_others(pair):
    """Of other threads, too, and those of the peer: nothing else does (see ``PrivateGroup.end_waits``)."""
    group, other = pair
    peer_waits = other.recv([torch.zeros(1)], 0, 1)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(error_of, receive(group, 2).wait)
        time.sleep(0.1)
        began = time.monotonic()
        timed_out = error_of(lambda: receive(group, 3).wait(timedelta(milliseconds=1)))
        ended = waiting.result()
    assert reason_of(timed_out) == "Timed out waiting 1ms for recv operation to complete"
    assert reason_of(ended) == "Application timeout caused pair closure"
    later = error_of(lambda: receive(group, 4))
    peers = error_of(peer_waits.wait)
    assert time.monotonic() - began < SOON / 2
    assert all(is_connection_error(error) for error in (timed_out, ended, later, peers))


def test_other_errors():
    for error in (ValueError("/gloo/"), RuntimeError("Connection refused by a database"), TimeoutError("timeout")):
        assert not is_connection_error(error)
        assert not is_store_timeout(error)
