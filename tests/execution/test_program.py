"""What a rank's actions are compiled into: when sends are released, when receives are posted."""

import pytest

import penstock as ps
from penstock.execution.channel import Progress
from penstock.execution.compiler import compile_program
from penstock.execution.messages import sent_by
from penstock.execution.send_releases import find_releases
from penstock.ir.actions import RECV_B, RECV_F


class Logged:
    """Operations that note what runs, and which sends are released."""

    def __init__(self, microbatches):
        self.microbatches, self.log, self.sent = microbatches, [], {}

    def operation(self, action):
        def operation(_):
            self.log.append(str(action))
            if message := sent_by(action):
                self.sent[message.key(self.microbatches)] = str(action)

        return operation

    def release_sends(self, keys):
        return lambda _: self.log.extend(f"end {self.sent.pop(key)}" for key in keys)

    def label(self, action):
        return str(action)


def run(schedule, rank, *, early=False, by_level=False):
    """What a rank does, in order: its actions, and "end ACTION" for each send that is released."""
    logged = Logged(schedule.microbatches)
    program = compile_program(
        schedule.actions[rank],
        logged,
        find_releases(schedule, rank, by_level=by_level),
        rank=rank,
        rank_of=dict(enumerate(schedule.placement.rank_of)).get,
        early_receives=early,
    )
    program.run(None, Progress())
    assert not logged.sent
    return logged.log


def test_a_send_is_released_when_a_message_proves_that_it_has_arrived():
    schedule = ps.lower(ps.build("1F1B", ranks=2, microbatches=3), unshard=False, reduce=False)
    assert " ".join(run(schedule, 0)) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 end 0SEND_F0 0F2 0SEND_F2 0RECV_B1 0B1 end 0SEND_F1 0RECV_B2 0B2 "
        "end 0SEND_F2"
    )
    assert " ".join(run(schedule, 1)) == (
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 end 1SEND_B0 1B2 1SEND_B2 "
        "end 1SEND_B1 end 1SEND_B2"
    )


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "V-Min"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("by_level", [False, True])
def test_every_send_is_released_once_and_after_it_is_posted(name, early, by_level):
    schedule = ps.lower(ps.build(name, ranks=4, microbatches=6))
    for rank in range(4):
        log = run(schedule, rank, early=early, by_level=by_level)
        sends = [text for text in log if "SEND" in text and not text.startswith("end")]
        ends = [text.removeprefix("end ") for text in log if text.startswith("end")]
        assert sorted(sends) == sorted(ends)
        for text in ends:
            assert log.index(f"end {text}") > log.index(text)


def test_receives_are_posted_beside_sends():
    schedule = ps.lower(ps.build("1F1B", ranks=2, microbatches=5), unshard=False, reduce=False)
    assert " ".join(text for text in run(schedule, 1, early=True) if "end" not in text) == (
        "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1B0 1SEND_B0 1RECV_F3 1RECV_F4 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1F3 1B3 "
        "1SEND_B3 1F4 1B4 1SEND_B4"
    )


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "V-Min"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_only_receives_move_and_none_past_a_computation(name, ranks):
    schedule = ps.lower(ps.build(name, ranks=ranks, microbatches=9))
    rank_of = schedule.placement.rank_of
    for rank in range(ranks):
        early, plain = run(schedule, rank, early=True), run(schedule, rank)
        assert [text for text in early if "RECV" not in text] == [text for text in plain if "RECV" not in text]
        for peer in range(ranks):
            from_peer = [
                str(action)
                for action in schedule.actions[rank]
                if (action.computation_type is RECV_F and rank_of[action.stage_index - 1] == peer)
                or (action.computation_type is RECV_B and rank_of[action.stage_index + 1] == peer)
            ]
            assert [text for text in early if text in from_peer] == from_peer
        for text in plain:
            if "RECV" in text:
                assert _computed_before(text, early) in range(
                    _computed_before(text, plain) - 6, _computed_before(text, plain) + 1
                )


def _computed_before(text, log):
    """How many compute actions run before a transfer."""
    before = log[: log.index(text)]
    return sum("SEND" not in one and "RECV" not in one and "SHARD" not in one and "REDUCE" not in one for one in before)
