"""Requests to a store that has stopped answering end."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from penstock.runtime.transport.bounded_store import BoundedStore, SilentStoreError

HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


@pytest.fixture
def store():
    bounded = BoundedStore(dist.HashStore(), 5.0, "store of a test")
    yield bounded
    bounded.close()
    assert "store of a test" not in [thread.name for thread in threading.enumerate()]


def test_requests_are_answered(store):
    store.set("a", b"=1")
    assert store.get("a") == b"=1"
    assert store.check(["a"])
    assert not store.check(["b"])
    assert store.compare_set("c", "", "x") == b"x"
    assert store.add("n", 2) == 2
    store.wait(["a"], timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        store.wait(["b"], timedelta(milliseconds=20))


def test_it_ends_without_being_closed():
    BoundedStore(dist.HashStore(), 5.0, "forgotten store").set("a", "1")
    deadline = time.monotonic() + 30
    while "forgotten store" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < deadline


@pytest.mark.processes
def test_a_host_that_is_stopped():
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        client = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
        bounded = BoundedStore(client, 1.0, "stopped store")
        bounded.set("a", "1")
        os.kill(host.pid, signal.SIGSTOP)
        os.waitpid(host.pid, os.WUNTRACED)  # until it has stopped
        for _ in range(2):  # the second one at once
            with pytest.raises(SilentStoreError, match="no answer for 1 s"):
                bounded.check(["a"])
        bounded.close()
        os.kill(host.pid, signal.SIGCONT)
        bounded._thread.join(30)
        assert not bounded._thread.is_alive()
    finally:
        host.kill()
        host.communicate()
