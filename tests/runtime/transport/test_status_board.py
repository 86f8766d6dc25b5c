import json

import pytest
import torch.distributed as dist

from penstock.runtime.transport.protocol import Failure
from penstock.runtime.transport.status_board import RankStatus, StatusBoard, decoded, encoded
from penstock.runtime.transport.watchdog import trace_waits

FAILURE = Failure(2, "rank 2 raised ValueError: \N{SNOWMAN}", "2F0", 2, 0, "Traceback ...")


@pytest.fixture
def store():
    return dist.HashStore()


def test_the_first_failure_wins(store):
    first, second = StatusBoard(store, 0, 2), StatusBoard(store, 1, 2)
    assert first.failure() is None
    assert second.publish_failure(FAILURE) == FAILURE
    assert first.publish_failure(Failure(0, "late")) == FAILURE
    assert first.failure() == FAILURE


@pytest.mark.parametrize("failure", [FAILURE, Failure(0, "")])
def test_there_and_back(failure):
    assert decoded(encoded(failure).encode(), 1) == failure


def test_a_long_failure_is_cut():
    text = encoded(Failure(1, "a" + "\N{SNOWMAN}" * 100_000 + "z", traceback="a" + "\0" * 100_000 + "the end"))
    failure = decoded(text.encode(), 0)
    assert failure.message.startswith("a")
    assert failure.message.endswith("z")
    assert "cut" in failure.message
    assert failure.traceback.endswith("the end")
    assert len(failure.message) + len(failure.traceback) < 40_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95garbage",
        b"[" * 100_000,
        b"[]",
        b"7",
        b'{"version": 1}',
        b'{"version": 2' + encoded(FAILURE).encode()[13:],
        b" " * 1_000_000 + encoded(FAILURE).encode(),
        *(
            json.dumps(json.loads(encoded(FAILURE)) | wrong).encode()
            for wrong in (
                {"rank": -1},
                {"rank": None},
                {"rank": True},
                {"message": 7},
                {"message": None},
                {"message": "x" * 8_001},
                {"stage": "2"},
                {"stage": 2**40},
                {"action": ["2F0"]},
                {"traceback": {}},
            )
        ),
    ],
)
def test_garbage_is_a_failure_that_says_so(data):
    failure = decoded(data, 3)
    assert failure.rank == 3
    assert f"a failure was told that cannot be read: {len(data)} bytes, b'" in failure.message
    assert len(failure.message) < 400


def test_trace_waits(store):
    statuses = {
        0: RankStatus("0F1", None, 31),
        1: RankStatus("1RECV_F3", 0, 30),
        3: RankStatus("3RECV_B0", 4, 30),
        4: RankStatus("4RECV_F0", 3, 30),
        5: RankStatus(None, None, 0),
        6: RankStatus("6RECV_F0", 0, 0.2),
    }
    for rank, status in statuses.items():
        StatusBoard(store, rank, 8).publish_status(status)
    board = StatusBoard(store, 2, 8)

    def told(peer):
        return trace_waits(board, 2, "2RECV_F3", peer)

    assert told(0) == "rank 2 waits in 2RECV_F3 for rank 0, which is in 0F1 since 31 s"
    assert (
        told(1) == "rank 2 waits in 2RECV_F3 for rank 1, which waits in 1RECV_F3 for rank 0, which is in 0F1 since 31 s"
    )
    assert "rank 3, which waits in 3RECV_B0 for rank 4, which waits in 4RECV_F0 for rank 3: each rank must" in told(3)
    assert told(5).endswith("for rank 5, which is between two steps: each rank must take as many, of the same kind")
    assert told(6).endswith("for rank 6, which is in 6RECV_F0 since 0 s")
    assert told(7).endswith("for rank 7, which has not begun a step")


def test_a_rank_that_is_silent(store):
    store.set("status/0", json.dumps({"label": "0F1", "peer": None, "seconds": 1, "at": 1_000_000_000}))
    store.set("status/1", "garbage")
    store.set("status/2", json.dumps({"label": 7, "peer": None, "seconds": 1, "at": 0}))
    board = StatusBoard(store, 3, 4)
    assert "which was in 0F1, and has not been heard of for" in trace_waits(board, 3, "3F0", 0)
    assert board.status(1) is None
    assert board.status(2) is None


def test_a_chain_is_not_told_for_ever(store):
    for rank in range(100):
        StatusBoard(store, rank, 101).publish_status(RankStatus(f"{rank}F0", rank + 1, 30))
    told = trace_waits(StatusBoard(store, 0, 101), 0, "0F0", 1)
    assert "88 more ranks, and finally for rank 100, which has not begun a step" in told
