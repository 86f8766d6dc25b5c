"""Deferring receives, a block of ranks at a time, against a slow reader of one row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.graph import array_blocks as blocks
from penstock.graph.action_table import ActionTable
from penstock.ir.actions import RECV_B, RECV_F, SEND_B, SEND_F
from penstock.lowering.defer_receives import defer_receives, defer_with_turns
from penstock.lowering.pipeline import WITHOUT_LANES
from penstock.lowering.send_receive import send_receive, send_receive_with_turns
from penstock.schedules.registry import RECIPES
from penstock.verification.deadlock import check_deadlock

USED_BY = {RECV_F: ("F",), RECV_B: ("B", "I")}
STAGE_OFFSET = {SEND_F: 1, SEND_B: -1, RECV_F: -1, RECV_B: 1}


class SlowRank:
    """One rank reads its row and keeps every receive back until it is due."""

    def __init__(self, schedule, rank, look_ahead):
        self.row, self.rank, self.look_ahead = schedule.actions[rank], rank, look_ahead
        self.rank_of = schedule.placement.rank_of
        uses = sorted((use, step) for step, cell in enumerate(self.row) if (use := self.use(cell, step)))
        self.use_of = {step: use for use, step in uses}
        self.number_of = {step: number for number, (_, step) in enumerate(uses)}
        self.uses = [use for use, _ in uses]

    def use(self, cell, step):
        """The cell that uses a receive, and which of its sub-actions does."""
        for later in range(step + 1, len(self.row)):
            for part, (stage, kind, microbatch, _) in enumerate(self.row[later].parts):
                if str(kind) in USED_BY.get(cell.computation_type, ()) and (stage, microbatch) == cell[:3:2]:
                    return later, part
        return None

    def peer(self, cell):
        return self.rank_of[cell.stage_index + STAGE_OFFSET[cell.computation_type]]

    def due(self, step):
        """Before which cell a receive is posted; that may be an earlier one than itself."""
        number = self.number_of[step] - (self.look_ahead or 0)
        return self.uses[number][0] if number >= 0 else -1

    def deferred(self):
        done, kept = [], []
        for step, cell in enumerate(self.row):
            if step in self.use_of and self.due(step) > step:
                kept.append(step)
                continue
            if cell.computation_type in (SEND_F, SEND_B):
                higher = self.peer(cell) > self.rank and self.look_ahead is None
                now = [other for other in kept if higher and self.peer(self.row[other]) == self.peer(cell)]
            else:
                now = [other for other in kept if self.due(other) == step]
                now.sort(key=None if self.look_ahead else self.use_of.get)
            done += [self.row[other] for other in now] + [cell]
            kept = [other for other in kept if other not in now]
        assert not kept
        return done


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "SIZE", 7)


def slowly(schedule, look_ahead):
    return [SlowRank(schedule, rank, look_ahead).deferred() for rank in range(schedule.ranks)]


@given(
    st.sampled_from(RECIPES),
    st.integers(1, 5),
    st.integers(1, 9),
    st.none() | st.integers(0, 4),
    st.sampled_from([1, 40]),
)
@settings(max_examples=80, deadline=None)
def test_as_a_slow_reader_does_it(recipe, ranks, microbatches, look_ahead, size):
    lowered = send_receive(ps.build(recipe.name, ranks=ranks, microbatches=microbatches))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SIZE", size)
        in_blocks = defer_receives(lowered, look_ahead)
    assert in_blocks == defer_receives(lowered, look_ahead)
    assert [list(row) for row in in_blocks.actions] == slowly(lowered, look_ahead)


@given(st.sampled_from(RECIPES), st.integers(2, 4), st.integers(2, 6), st.none() | st.integers(0, 4), st.randoms())
@settings(max_examples=60, deadline=None)
def test_receives_that_were_posted_anywhere_before_their_use(recipe, ranks, microbatches, look_ahead, chance):
    lowered = send_receive(ps.build(recipe.name, ranks=ranks, microbatches=microbatches))
    rows = [list(row) for row in lowered.actions]
    for row in rows:
        for step, cell in enumerate(row):
            if cell.computation_type in USED_BY:
                row.insert(chance.randint(0, step), row.pop(step))
    early = ps.Schedule(rows, placement=lowered.placement, microbatches=microbatches)
    assert [list(row) for row in defer_receives(early, look_ahead).actions] == slowly(early, look_ahead)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("look_ahead", [None, 0, 2])
@pytest.mark.usefixtures("small_blocks")
def test_the_turns_are_a_witness_for_late_receives_too(recipe, look_ahead, monkeypatch):
    monkeypatch.setattr("penstock.verification.deadlock._starts", None)  # a walk would fail
    for ranks, microbatches in ((1, 2), (2, 5), (4, 6)):
        given_turns = send_receive_with_turns(ps.build(recipe.name, ranks=ranks, microbatches=microbatches))
        before = given_turns[1].copy()
        late, turns = defer_with_turns(*given_turns, look_ahead)
        assert not list(check_deadlock(ActionTable(late), WITHOUT_LANES, turns))
        assert np.array_equal(given_turns[1], before)


def test_the_turns_do_not_hide_that_late_receives_get_into_each_others_way():
    schedule = ps.build("InterleavedZeroBubble", ranks=4, microbatches=8)
    late, turns = defer_with_turns(*send_receive_with_turns(schedule))
    model = ps.CommModel("rendezvous", "pair")
    found = [problem.kind for problem in check_deadlock(ActionTable(late), model, turns)]
    assert found == [finding.kind for finding in ps.check(late, model=model)] == ["deadlock"]
