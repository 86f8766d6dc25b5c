import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Action, ActionError, ComputationType, PenstockError, ScheduleSyntaxError
from penstock.ir.actions import LARGEST_STAGE, parse_cell
from strategies import actions

F, I, B, W = (ComputationType(letter) for letter in "FIBW")  # noqa: E741 - the names of the field


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, F, 0)),
        ("2B0", Action(2, B, 0)),
        ("12I34", Action(12, I, 34)),
        ("0W0", Action(0, W, 0)),
        ("3SEND_F1", Action(3, ComputationType.SEND_F, 1)),
        ("3RECV_F1", Action(3, ComputationType.RECV_F, 1)),
        ("3SEND_B1", Action(3, ComputationType.SEND_B, 1)),
        ("3RECV_B1", Action(3, ComputationType.RECV_B, 1)),
        ("2UNSHARD", Action(2, ComputationType.UNSHARD)),
        ("2RESHARD", Action(2, ComputationType.RESHARD)),
        ("2REDUCE_GRAD", Action(2, ComputationType.REDUCE_GRAD)),
        ("(2F5;7B3)OVERLAP_F_B", Action.overlap(Action(2, F, 5), Action(7, B, 3))),
        ("(2F5;7I3)OVERLAP_F_B", Action(-1, ComputationType.OVERLAP_F_B, None, (Action(2, F, 5), Action(7, I, 3)))),
    ],
)
def test_text_form_and_its_inverse(text, action):
    assert str(action) == repr(action) == text
    assert Action.from_str(text) == action


@given(actions())
def test_parse_of_print_is_the_action(action):
    assert parse_cell(str(action)) == action
    assert Action.from_str(f"  {action}\t") == action


@given(actions())
def test_actions_are_values(action):
    assert copy.deepcopy(action) == action
    assert pickle.loads(pickle.dumps(action)) == action
    assert len({action, Action.from_str(str(action))}) == 1
    with pytest.raises(AttributeError):
        action.stage_index = 3


@pytest.mark.parametrize(
    "text",
    [
        "2F0garbage", "-1F0", "F0", "2Q1", "(1F0", "2F", "2UNSHARD0", "02F0", "2F00", "2f0", "2F-1", "2 F0", "2F0.0",
        "²F0", "2F٣", "()OVERLAP_F_B", "(2F0)OVERLAP_F_B", "(2F0;)OVERLAP_F_B", "(2F0; 3B0)OVERLAP_F_B",
        "(2F0;3SEND_F0)OVERLAP_F_B", "(2F0;3B0)OVERLAP", "((2F0;3B0)OVERLAP_F_B;4B0)OVERLAP_F_B", "OVERLAP_F_B",
        f"{LARGEST_STAGE + 1}F0", "9" * 5000 + "F0", "2F0\n", "2F0,", '"2F0"', "nan", ".",
    ],
)  # fmt: skip
def test_anything_else_is_an_error_that_shows_a_right_form(text):
    with pytest.raises(ScheduleSyntaxError) as caught:
        parse_cell(text)
    assert caught.value.text == text
    assert repr(text.strip(" \t"))[:30] in str(caught.value)
    assert str(caught.value).count("; write ") == 1
    assert len(str(caught.value)) < 250


@given(st.text(alphabet="0123456789FBIWSENDRCV_()OLAP; ", max_size=30) | st.text(max_size=20))
def test_strange_text_is_an_action_or_our_error(text):
    try:
        action = parse_cell(text)
    except PenstockError:
        return
    assert text.strip(" \t") == ("" if action is None else str(action))


@pytest.mark.parametrize("text", ["", "   ", "\t"])
def test_an_empty_cell_is_idle_but_no_action(text):
    assert parse_cell(text) is None
    with pytest.raises(ScheduleSyntaxError):
        Action.from_str(text)


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ((-1, F, 0), "stage_index must be between 0"),
        ((0, F, -1), "microbatch_index must be between 0"),
        ((0, F), "needs a microbatch; write e.g. '0F0'"),
        ((0, "Q", 0), "'Q' is not a computation type"),
        ((1.5, F, 0), "stage_index must be an integer, got 1.5"),
        ((0, ComputationType.UNSHARD, 1), "write '0UNSHARD'"),
        ((0, F, 0, (Action(0, F, 0),)), "only OVERLAP_F_B takes sub_actions"),
        (
            (3, ComputationType.OVERLAP_F_B, None, (Action(0, F, 0), Action(0, B, 1))),
            "the stage_index of an overlap must be -1",
        ),
        ((-1, ComputationType.OVERLAP_F_B, None, None), "two or more"),
        ((-1, ComputationType.OVERLAP_F_B, None, (Action(0, F, 0), "1B0")), "can only contain F, B, I and W actions"),
        ((LARGEST_STAGE + 1, F, 0), str(LARGEST_STAGE)),
        (
            (-1, ComputationType.OVERLAP_F_B, 5, (Action(0, F, 0), Action(0, B, 1))),
            "an overlap takes no microbatch_index",
        ),
    ],
)
def test_fields_that_do_not_go_together(fields, reported):
    with pytest.raises(ActionError, match=reported.replace("(", r"\(")):
        Action(*fields)


def test_replacing_a_field_is_checked_too():
    assert Action(2, F, 0)._replace(microbatch_index=3) == Action(2, F, 3)
    with pytest.raises(ActionError):
        Action(2, F, 0)._replace(stage_index=-1)


def test_numpy_numbers_become_plain_ones():
    action = Action(np.int64(2), "F", np.int32(1))
    assert action == Action(2, F, 1)
    assert type(action.stage_index) is int


def test_there_are_twelve_types():
    assert len(ComputationType) == 12
    assert str(ComputationType.FULL_BACKWARD) == "B"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("0SEND_F0@3", (0, ComputationType.SEND_F, 0, None, 3)),
        ("3RECV_F0@0", (3, ComputationType.RECV_F, 0, None, 0)),
        ("3SEND_B7@1", (3, ComputationType.SEND_B, 7, None, 1)),
        ("1RECV_B7@3", (1, ComputationType.RECV_B, 7, None, 3)),
    ],
)
def test_a_transfer_beyond_the_next_stage_names_the_other_one(text, fields):
    action = Action(*fields)
    assert Action.from_str(text) == action == fields
    assert str(action) == text
    assert action.peer_index == fields[4]
    assert pickle.loads(pickle.dumps(action)) == copy.copy(action) == action


def test_all_others_have_no_peer_and_are_tuples_of_four():
    action = Action(0, ComputationType.SEND_F, 0)
    assert action.peer_index is None
    assert tuple(action) == (0, ComputationType.SEND_F, 0, None)
    assert action != Action(0, ComputationType.SEND_F, 0, peer_index=2)


def test_replacing_a_field_keeps_the_peer():
    action = Action.from_str("0SEND_F0@3")
    assert str(action._replace(microbatch_index=2)) == "0SEND_F2@3"
    assert str(action._replace(peer_index=None)) == "0SEND_F0"
    assert str(Action.from_str("0SEND_F0")._replace(peer_index=2)) == "0SEND_F0@2"
    with pytest.raises(ActionError, match="needs no '@3'; write '2SEND_F0'"):
        action._replace(stage_index=2)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("0F0@3", "only SEND_F, RECV_F, SEND_B, RECV_B exchange with a peer; a F action got 3"),
        ("0UNSHARD@3", "a UNSHARD action got 3"),
        ("2SEND_F0@3", "stage 3 is next to stage 2 and needs no '@3'; write '2SEND_F0'"),
        ("2SEND_B0@1", "stage 1 is next to stage 2 and needs no '@1'; write '2SEND_B0'"),
        ("2SEND_F0@0", "SEND_F goes to a later stage than its own, stage 2; stage 0 is not one"),
        ("2SEND_F0@2", "SEND_F goes to a later stage than its own, stage 2; stage 2 is not one"),
        ("2RECV_F0@4", "RECV_F goes from an earlier stage than its own, stage 2; stage 4 is not one"),
        ("2SEND_B0@4", "SEND_B goes to an earlier stage"),
        ("2RECV_B0@0", "RECV_B goes from a later stage"),
        (f"0SEND_F0@{LARGEST_STAGE}", "are 32767 stages apart; at most 16384 are possible"),
        (f"0SEND_F0@{LARGEST_STAGE + 1}", "peer_index must be between 0 and 32767"),
        ("0SEND_F@3", "SEND_F needs a microbatch"),
        ("0SEND_F0@", "'0SEND_F0@' is not an action"),
        ("0SEND_F0@-1", "'0SEND_F0@-1' is not an action"),
        ("(0F0;1SEND_F0@3)OVERLAP_F_B", "an overlap can only contain F, B, I and W actions"),
    ],
)
def test_a_peer_that_cannot_be(text, reported):
    with pytest.raises(ScheduleSyntaxError) as caught:
        parse_cell(text)
    assert reported in str(caught.value)
