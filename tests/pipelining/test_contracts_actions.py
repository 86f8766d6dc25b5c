"""Actions as programs handle them: tuples that are written and read back as text."""

import copy
import pickle

import pytest

SHORT = {"F": "FORWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT", "B": "FULL_BACKWARD"}
LONG = ["UNSHARD", "RESHARD", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "OVERLAP_F_B", "REDUCE_GRAD"]


def test_types_are_strings_and_have_names_in_the_module(s):
    for value, name in (SHORT | {long: long for long in LONG}).items():
        kind = s._ComputationType(value)
        assert kind is getattr(s._ComputationType, name)
        assert kind is getattr(s, name)
        assert kind == value
        assert kind.value == value
        assert isinstance(kind, str)
        assert s._ComputationType.from_str(value) is kind
    assert (s.F, s.B, s.I, s.W) == (s.FORWARD, s.FULL_BACKWARD, s.BACKWARD_INPUT, s.BACKWARD_WEIGHT)
    assert len(s._ComputationType) == 12


def test_an_unknown_type_is_a_runtime_error(s):
    with pytest.raises(RuntimeError, match="X"):
        s._ComputationType.from_str("X")


def test_an_action_is_a_tuple(s):
    action = s._Action(2, s.F, 1)
    stage, kind, microbatch, inner = action
    assert (stage, kind, microbatch, inner) == (2, s.F, 1, None)
    assert action == (2, s.F, 1, None)
    assert action == (2, "F", 1, None)
    assert hash(action) == hash((2, s.F, 1, None))
    assert isinstance(action, tuple)
    assert action._fields == ("stage_index", "computation_type", "microbatch_index", "sub_actions")
    assert action._replace(microbatch_index=5) == s._Action(2, s.F, 5)
    assert s._Action(1, s.UNSHARD).microbatch_index is None
    assert s._Action(stage_index=0, computation_type=s.W, microbatch_index=3) in {s._Action(0, s.W, 3)}
    with pytest.raises(AttributeError):
        action.stage_index = 1


@pytest.mark.parametrize("written", ["1F0", "2I1", "0W3", "0B3", "1UNSHARD", "3RESHARD", "2SEND_B2", "1RECV_F1",
                                     "12REDUCE_GRAD", "0SEND_F10", "7RECV_B0", "(2F5;7B3)OVERLAP_F_B",
                                     "(0F1;3I0)OVERLAP_F_B"])  # fmt: skip
def test_text_is_read_back(s, written):
    action = s._Action.from_str(written)
    assert repr(action) == str(action) == f"{action}" == written
    assert s._Action.from_str(repr(action)) == action
    assert s._Action.from_str(f"  {written} ") == action


def test_a_pair_holds_its_actions(s):
    pair = s._Action.from_str("(2F5;7B3)OVERLAP_F_B")
    assert pair == s._Action(-1, s.OVERLAP_F_B, None, (s._Action(2, s.F, 5), s._Action(7, s.B, 3)))
    assert s._Action.from_str(str(s._Action(4, s.OVERLAP_F_B, None, pair.sub_actions))) == pair


@pytest.mark.parametrize("written", ["", "   "])
def test_an_empty_cell_is_no_action(s, written):
    assert s._Action.from_str(written) is None


@pytest.mark.parametrize("written", ["F0", "1X0", "one", "-"])
def test_what_is_no_action_is_a_runtime_error(s, written):
    with pytest.raises(RuntimeError):
        s._Action.from_str(written)


def test_which_actions_compute(s):
    compute = {kind for kind in s._ComputationType if s._Action(0, kind, 0).is_compute_op}
    assert compute == {s.F, s.B, s.I, s.W, s.OVERLAP_F_B}


def test_actions_are_copied_and_pickled(s):
    pair = s._Action.from_str("(2F5;7B3)OVERLAP_F_B")
    assert copy.deepcopy(pair) == pair
    assert pickle.loads(pickle.dumps(pair)) == pair
    assert type(pickle.loads(pickle.dumps(pair))) is s._Action


def test_the_grid_of_an_order(package, s):
    order = package.rows("0F0 0B0", ". 1F0 1B0")
    grid = s._format_pipeline_order(order)
    lines = grid.splitlines()
    assert lines[0].split() == ["Rank", "0", "Rank", "1"]
    assert [line.split() for line in lines[1:]] == [["Step", "0:", "0F0"], ["Step", "1:", "0B0", "1F0"],
                                                    ["Step", "2:", "1B0"]]  # fmt: skip
    assert order == package.rows("0F0 0B0", ". 1F0 1B0")
    marked = s._format_pipeline_order(order, error_step_number=1).splitlines()
    assert [line.endswith("ERROR HERE") for line in marked] == [False, False, True, False]
