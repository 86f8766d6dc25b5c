import json

import pytest
import torch.distributed as dist

from penstock.runtime.transport.protocol import Failure
from penstock.runtime.transport.status_board import RankStatus, StatusBoard, decode, encode
from penstock.runtime.transport.watchdog import trace_waits

FAILURE = Failure(2, "rank 2 raised ValueError: \N{SNOWMAN}", "2F0", 2, 0, "Traceback ...")


@pytest.fixture
def store():
    return dist.HashStore()


def test_the_first_failure_wins(store):
    first, second = StatusBoard(store, 0, 2, 9.0), StatusBoard(store, 1, 2, 9.0)
    assert first.failure() is None
    assert second.publish_failure(FAILURE) == FAILURE
    assert first.publish_failure(Failure(0, "late")) == FAILURE
    assert first.failure() == FAILURE


@pytest.mark.parametrize("failure", [FAILURE, Failure(0, "")])
def test_encode_and_decode(failure):
    assert decode(encode(failure).encode(), 1) == failure


def test_a_long_failure_is_cut():
    text = encode(Failure(1, "a" + "\N{SNOWMAN}" * 100_000 + "z", traceback="a" + "\0" * 100_000 + "the end"))
    failure = decode(text.encode(), 0)
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
        b'{"version": 2' + encode(FAILURE).encode()[13:],
        b" " * 1_000_000 + encode(FAILURE).encode(),
        *(
            json.dumps(json.loads(encode(FAILURE)) | wrong).encode()
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
def test_garbage_is_reported_as_a_failure(data):
    failure = decode(data, 3)
    assert failure.rank == 3
    assert f"a rank reported a failure that could not be decoded ({len(data)} bytes: b'" in failure.message
    assert len(failure.message) < 400


def test_trace_waits(store):
    statuses = {
        0: RankStatus("0F1", None, 31),
        1: RankStatus("1RECV_F3", 0, 30),
        3: RankStatus("3RECV_B0", 4, 30),
        4: RankStatus("4RECV_F0", 3, 30),
        5: RankStatus(None, None, 0),
        6: RankStatus("6RECV_F0", 0, 0.2),
        8: RankStatus(None, None, 0, closed_after=1),
    }
    for rank, status in statuses.items():
        StatusBoard(store, rank, 9, 9.0).publish_status(status)
    board = StatusBoard(store, 2, 9, 9.0)

    def waits(peer):
        return trace_waits(board, 2, "2RECV_F3", peer)

    assert waits(0) == "rank 2 waits in 2RECV_F3 for rank 0, which has been in 0F1 for 31 s"
    assert (
        waits(1)
        == "rank 2 waits in 2RECV_F3 for rank 1, which waits in 1RECV_F3 for rank 0, which has been in 0F1 for 31 s"
    )
    assert "rank 3, which waits in 3RECV_B0 for rank 4, which waits in 4RECV_F0 for rank 3; all ranks must" in waits(3)
    assert waits(8).endswith(
        "for rank 8, which closed its pipeline after 1 step; all ranks must run the same number of steps"
    )
    assert waits(5).endswith("for rank 5, which is between steps; all ranks must run the same steps")
    assert waits(6).endswith("for rank 6, which has been in 6RECV_F0 for 0 s")
    assert waits(7).endswith("for rank 7, which has not started a step")


def test_a_rank_that_is_silent(store):
    store.set("status/0", json.dumps({"label": "0F1", "peer": None, "seconds": 1, "at": 1_000_000_000}))
    store.set("status/1", "garbage")
    store.set("status/2", json.dumps({"label": 7, "peer": None, "seconds": 1, "at": 0}))
    board = StatusBoard(store, 3, 4, 9.0)
    assert "which was in 0F1 and has not reported for" in trace_waits(board, 3, "3F0", 0)
    assert board.status(1) is None
    assert board.status(2) is None


def test_a_long_chain_is_cut(store):
    for rank in range(100):
        StatusBoard(store, rank, 101, 9.0).publish_status(RankStatus(f"{rank}F0", rank + 1, 30))
    text = trace_waits(StatusBoard(store, 0, 101, 9.0), 0, "0F0", 1)
    assert "88 more ranks, and finally for rank 100, which has not started a step" in text
