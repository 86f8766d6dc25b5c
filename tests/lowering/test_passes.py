"""Each pass as a picture, before and after; and what holds for all of them."""

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.graph.comm_model import MODELS
from penstock.lowering.defer_receives import defer_receives
from penstock.lowering.merge_backward import merge_backward
from penstock.lowering.repair import without_transfers
from penstock.lowering.send_receive import send_receive
from penstock.lowering.unshard_reshard import unshard_reshard
from penstock.schedules.registry import RECIPES


def grid(text):
    return ps.Schedule.from_text(dedent(text))


def words(text):
    return text.split()


def drawn(schedule):
    return [line.split()[2:] for line in schedule.grid(aligned=False).splitlines()[1:]]


def test_merge_backward():
    merged = merge_backward(grid("""
        rank 0: 0F0 0F1 .   0I0 .   0W0 0I1
        rank 1: 1F0 1I0 1F1 1W0 1I1 1W1 .
        rank 2: 2F0 2I0 2F1 2W0 (2F2;2I1)OVERLAP_F_B 2W1
    """))  # fmt: skip
    assert drawn(merged) == [
        ["0F0", "0F1", "0B0", "0I1"],
        ["1F0", "1I0", "1F1", "1W0", "1B1"],
        ["2F0", "2I0", "2F1", "2W0", "(2F2;2I1)OVERLAP_F_B", "2W1"],
    ]


def test_a_weight_gradient_of_the_next_rank_does_not_merge():
    merged = merge_backward(ps.Schedule([["0F0", "0I0"], ["0W0"]], placement=ps.Placement((0,), 2)))
    assert drawn(merged) == [["0F0", "0I0"], ["0W0"]]


def test_unshard_in_time_and_reshard_when_room_is_needed():
    schedule = unshard_reshard(grid("0F0 1F0 2F0 2B0 1B0 0B0"), max_active_stages=2)
    assert drawn(schedule) == [
        words("0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD")
    ]


def test_transfers_are_left_out_on_one_rank():
    lowered = send_receive(
        grid("""
        rank 0: 0F0 3F0 3B0 0B0
        rank 1: 1F0 2F0 2B0 1B0
    """)
    )
    assert drawn(lowered) == [
        ["0F0", "0SEND_F0", "3RECV_F0", "3F0", "3B0", "3SEND_B0", "0RECV_B0", "0B0"],
        ["1RECV_F0", "1F0", "2F0", "2SEND_F0", "2RECV_B0", "2B0", "1B0", "1SEND_B0"],
    ]


def test_look_ahead_posts_receives_so_many_uses_earlier():
    early = send_receive(ps.build("ForwardOnly", ranks=2, microbatches=4))
    row = [f"1RECV_F{n}" for n in range(4)]
    assert drawn(early)[1][:2] == ["1RECV_F0", "1F0"]
    eager = ps.Schedule([early.actions[0], [*row, *[f"1F{n}" for n in range(4)]]])
    assert drawn(defer_receives(eager, 0))[1] == words("1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1RECV_F3 1F3")
    assert drawn(defer_receives(eager, 1))[1] == words("1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1RECV_F3 1F2 1F3")
    assert drawn(defer_receives(eager, 2))[1] == words("1RECV_F0 1RECV_F1 1RECV_F2 1F0 1RECV_F3 1F1 1F2 1F3")
    assert defer_receives(eager, 9) == eager


def pending_at_uses(row):
    """For each action that needs receives, how many others are posted already."""
    posted = set()
    for cell in row:
        if cell.computation_type in (ps.ComputationType.RECV_F, ps.ComputationType.RECV_B):
            posted.add(cell)
            continue
        used = set()
        for stage, kind, microbatch, _ in cell.parts:
            arrives = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(str(kind))
            used |= {action for action in posted if str(action) == f"{stage}{arrives}{microbatch}"}
        posted -= used
        if used:
            yield len(posted)
    assert not posted


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_no_more_receives_are_posted_ahead_than_asked_for(recipe, look_ahead):
    for ranks, microbatches in ((2, 3), (4, 8), (3, 2)):
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        lowered = ps.lower(schedule, defer_receives=True, look_ahead=look_ahead)
        assert all(count <= look_ahead for row in lowered.actions for count in pending_at_uses(row))


def test_look_ahead_needs_deferred_receives():
    with pytest.raises(ps.ScheduleError, match="only applies with defer_receives=True"):
        ps.lower(ps.build("GPipe", ranks=2, microbatches=2), look_ahead=2)


@pytest.mark.parametrize(
    "options", [{}, {"merge_backward": True}, {"unshard": False}, {"defer_receives": True}], ids=str
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_lowering_keeps_its_input_and_says_what_it_did(recipe, options):
    schedule = ps.build(recipe.name, ranks=3, microbatches=4)
    rows = list(schedule.actions)
    lowered = ps.lower(schedule, **options)
    assert list(schedule.actions) == rows
    assert (lowered.placement, lowered.microbatches) == (schedule.placement, schedule.microbatches)
    assert lowered.metadata == schedule.metadata
    assert lowered.lowered
    assert not any(None in row for row in lowered.actions)
    compute = [[cell for cell in row if cell.is_compute] for row in lowered.actions]
    assert compute == [
        list(row) for row in (merge_backward(schedule) if "merge_backward" in options else schedule).actions
    ]


@given(st.sampled_from(RECIPES), st.integers(1, 6), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_what_is_lowered_is_safe_under_every_model(recipe, ranks, microbatches, stages):
    """The order of the turns is one that every edge of every model keeps."""
    schedule = ps.build(
        recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages if recipe.any_stages else None
    )
    lowered = ps.lower(schedule)
    assert all(ps.safe_models(lowered).values())
    assert [ps.check(lowered, model=model) for model in MODELS[:1]] == [[]]
    assert without_transfers(ps.lower(schedule, unshard=False, reduce=False)) == schedule


def test_what_cannot_run_is_not_lowered():
    with pytest.raises(ps.VerificationError, match="1B0 needs 1F0, which comes later, at step 1"):
        ps.lower(grid("0F0 0B0\n1B0 1F0"))
    with pytest.raises(ps.ScheduleError, match="already lowered"):
        ps.lower(ps.lower(ps.build("GPipe", ranks=2, microbatches=2)))
    with pytest.raises(ps.SizeError, match="max_active_stages must be at least 1, got 0"):
        ps.lower(ps.build("GPipe", ranks=2, microbatches=2), max_active_stages=0)


def test_deferred_receives_can_be_proved_for_a_harsher_model():
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    assert ps.lower(schedule, defer_receives=True).lowered
    both_send = "rank 0 waits in 0SEND_F1, ahead of 0RECV_B0, for rank 1, which waits in 1SEND_B0, ahead of 1RECV_F1"
    with pytest.raises(ps.VerificationError, match=both_send):
        ps.lower(schedule, defer_receives=True, model=ps.CommModel("rendezvous", "pair"))
