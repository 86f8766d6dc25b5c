import copy
import pickle

import numpy as np
import pytest
from hypothesis import given

from penstock import Action, Placement, PlacementError, Schedule, ScheduleError, ScheduleSyntaxError, SizeError
from penstock.errors import EdgeError
from penstock.ir.edges import Edge, chain, links
from strategies import schedules

ROWS = {0: ["0F0", None, None, "0B0"], 1: [None, "1F0", "1B0"]}


def test_from_a_dict_rows_or_text():
    schedule = Schedule(ROWS)
    assert schedule == Schedule([["0F0", "", " ", "0B0"], ["", "1F0", "1B0"]])
    assert schedule == Schedule({1: iter(ROWS[1]), 0: ROWS[0]})
    assert schedule == Schedule.from_text("0F0 . . 0B0\n. 1F0 1B0")
    assert (schedule.ranks, schedule.stages, schedule.microbatches, schedule.steps) == (2, 2, 1, 4)
    assert schedule.placement == Placement.loop(2, 2)
    assert schedule.actions[1] == (None, Action.from_str("1F0"), Action.from_str("1B0"))
    assert schedule.actions[-1] == schedule.actions[1]


def test_actions_behave_like_a_tuple_of_rows():
    actions = Schedule(ROWS).actions
    assert len(actions) == 2
    assert actions[0] is actions[0], "made once"
    assert actions[:1] == (actions[0],)
    assert actions == [list(actions[0]), list(actions[1])]
    assert repr(actions) == "((0F0, None, None, 0B0), (None, 1F0, 1B0))"
    with pytest.raises(IndexError):
        actions[2]


@given(schedules())
def test_a_schedule_is_a_value(schedule):
    again = Schedule([[None if cell is None else str(cell) for cell in row] for row in schedule.actions])
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert copy.deepcopy(schedule) is schedule


def test_metadata_are_not_content():
    named = Schedule(ROWS, metadata={"name": "mine"})
    assert named == Schedule(ROWS)
    assert repr(named) == "<Schedule mine: 2 ranks, 2 stages, 1 microbatch, 4 actions>"
    assert pickle.loads(pickle.dumps(named)).metadata == {"name": "mine"}
    with pytest.raises(TypeError):
        named.metadata["name"] = "other"


def test_it_cannot_be_changed():
    schedule = Schedule(ROWS)
    with pytest.raises(AttributeError, match="is immutable"):
        schedule.microbatches = 3
    with pytest.raises(AttributeError, match="is immutable"):
        del schedule._codes
    with pytest.raises(ValueError, match="read-only"):
        schedule.codes[0] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        schedule.codes.flags.writeable = True
    codes = np.array(schedule.codes_of(0))
    from_codes = Schedule.from_codes([codes])
    codes[:] = 0
    assert from_codes == Schedule([ROWS[0]]), "the caller's array is not shared"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"microbatches": 1}, True),
        ({"microbatches": 2}, False),
        ({"placement": Placement.loop(2, 2)}, True),
        ({"placement": Placement.loop(2, 3)}, False),
    ],
)
def test_equality_goes_by_content(change, same):
    assert (Schedule(ROWS, **change) == Schedule(ROWS)) is same
    assert (hash(Schedule(ROWS, **change)) == hash(Schedule(ROWS))) is same
    assert Schedule(ROWS) != "a schedule"


def test_compute_only_or_lowered():
    assert Schedule(ROWS).compute_only
    assert Schedule([["(0F1;1B0)OVERLAP_F_B", None]]).compute_only
    assert not Schedule([["0F0", "0REDUCE_GRAD"]]).compute_only
    assert Schedule([["0F0", "0SEND_F0"]]).lowered


def test_a_stage_on_two_ranks_says_where():
    with pytest.raises(PlacementError, match=r"stage 1 is on rank 0 \(step 2\) and rank 1 \(step 1\)") as caught:
        Schedule([["0F0", "(0F1;2B0)OVERLAP_F_B", "1F0"], [None, "1F1"]])
    assert (caught.value.stage, caught.value.places) == (1, ((0, 2), (1, 1)))


def test_a_stage_on_no_rank():
    with pytest.raises(PlacementError, match="no rank runs stage 1, although there is a stage 2"):
        Schedule([["0F0"], ["2F0"]])
    with pytest.raises(PlacementError, match="no rank runs stage 0"):
        Schedule([["32767F0"]])


def test_a_rank_without_actions_needs_a_placement():
    with pytest.raises(PlacementError, match="rank 1 has no actions"):
        Schedule([["0F0"], [None]])
    assert Schedule([["0F0"], []], placement=Placement((0,), 2)).ranks == 2


def test_what_is_given_stands_even_if_the_actions_disagree():
    schedule = Schedule([["0F0", "1F7"], ["1F0"]], placement=Placement.loop(2, 2), microbatches=1)
    assert schedule.placement.rank_of == (0, 1)
    assert schedule.microbatches == 1


@pytest.mark.parametrize(
    ("make", "error", "reported"),
    [
        (lambda: Schedule([]), ScheduleError, "at least one rank"),
        (lambda: Schedule({0: ["0F0"], 2: ["1F0"]}), ScheduleError, "none for rank 1"),
        (
            lambda: Schedule([["0F0", 3]]),
            ScheduleError,
            "rank 0, step 1: a cell must be an Action, its text or None, got 3",
        ),
        (lambda: Schedule([["0F0"], ["1F0", "2Q1"]]), ScheduleSyntaxError, "row 2, cell 2: '2Q1' is not an action"),
        (lambda: Schedule(ROWS, placement=Placement.loop(3, 3)), PlacementError, "for 3 ranks, but there are 2 rows"),
        (lambda: Schedule(ROWS, microbatches=-1), SizeError, "microbatches must be at least 0, got -1"),
        (lambda: Schedule(ROWS, microbatches=1.5), SizeError, "microbatches must be an integer, got 1.5"),
        (lambda: Schedule(ROWS, microbatches=True), SizeError, "microbatches must be an integer, got True"),
        (lambda: Schedule(ROWS, placement=[0, 1]), PlacementError, "placement must be a Placement"),
        (lambda: Schedule(ROWS, metadata=3), ScheduleError, "metadata must be a mapping, got 3"),
        (lambda: Schedule("0F0 0B0"), ScheduleError, "use Schedule.from_text to parse text"),
        (lambda: Schedule(["0F0 0B0"]), ScheduleError, "the row of rank 0 must be a list of cells"),
        (lambda: Schedule(None), ScheduleError, "expected rows of cells, got None"),
        (lambda: Schedule([3]), ScheduleError, "the row of rank 0 must be a list of cells"),
        (lambda: Schedule.from_codes([np.array([15])]), ScheduleError, "the codes are not those of actions"),
        (lambda: Schedule.from_codes([np.array([16])]), ScheduleError, "the codes are not those of actions"),
    ],
)
def test_mistakes(make, error, reported):
    with pytest.raises(error, match=reported):
        make()


def test_steps_count_an_overlap_once():
    assert Schedule([["(0F1;1B0)OVERLAP_F_B", None, "0F2"]]).steps == 3


def test_numpy_numbers_become_plain_ones():
    schedule = Schedule(ROWS, microbatches=np.int64(1), placement=Placement(np.array([0, 1]), np.uint8(2)))
    assert schedule == Schedule(ROWS)
    assert type(schedule.microbatches) is int
    assert [type(rank) for rank in schedule.placement.rank_of] == [int, int]


def test_a_name_with_control_characters_is_shown_escaped():
    assert "\x1b" not in repr(Schedule(ROWS, metadata={"name": "evil\x1b]0;title\x07"}))


def test_codes_of_counts_from_the_end_too():
    schedule = Schedule(ROWS)
    assert schedule.codes_of(-1).tolist() == schedule.codes_of(1).tolist()
    with pytest.raises(IndexError):
        schedule.codes_of(2)


def test_a_schedule_is_a_chain_unless_it_has_other_edges():
    schedule = Schedule(ROWS)
    assert schedule.is_chain
    assert schedule.edges == chain(2)
    assert schedule.links == links(chain(2))
    assert schedule.with_edges([Edge(0, (1,), "hidden")]) == schedule, "the names of values are not content"
    assert schedule.with_edges([Edge(0, (1,), "hidden")]).edges == (Edge(0, (1,), "hidden"),)
    assert Schedule(ROWS, edges=chain(2)) == schedule
    assert hash(Schedule(ROWS, edges=chain(2))) == hash(schedule)


def test_edges_are_content():
    schedule = Schedule([["0F0", "2F0"], ["1F0"]])
    skip = schedule.with_edges([Edge(0, (2,), "skip"), (0, [1]), (1, [2])])
    assert schedule.is_chain
    assert not skip.is_chain
    assert skip != schedule
    assert skip.edges == (Edge(0, (2,), "skip"), Edge(0, (1,)), Edge(1, (2,)))
    assert [(link.source, link.target) for link in skip.links] == [(0, 1), (0, 2), (1, 2)]
    assert skip.with_edges(schedule.edges) == schedule
    assert skip == Schedule([["0F0", "2F0"], ["1F0"]], edges=skip.edges)
    assert skip != schedule.with_edges([Edge(0, (1,)), Edge(0, (2,)), Edge(1, (2,))]), "values come in another order"
    assert skip != schedule.with_edges([edge._replace(gradient=False) for edge in skip.edges])
    again = pickle.loads(pickle.dumps(skip))
    assert (again, hash(again), again.edges) == (skip, hash(skip), skip.edges)
    assert repr(skip) == "<Schedule: 2 ranks, 3 stages, 1 microbatch, 3 actions, 3 edges>"


@pytest.mark.parametrize(
    ("edges", "reported"),
    [
        ([(1, [0])], "an edge from stage 1 to stage 0 goes backwards"),
        ([(0, [7])], "edge 0>7 does not fit stages 0 to 1"),
        ([0], "an edge needs a source stage and its target stages, got 0"),
        (7, "edges must be a list of Edge, got 7"),
    ],
)
def test_edges_that_cannot_be(edges, reported):
    for make in (lambda: Schedule(ROWS, edges=edges), lambda: Schedule(ROWS).with_edges(edges)):
        with pytest.raises(EdgeError, match=reported):
            make()


def test_the_edges_of_a_lowered_schedule_stay():
    with pytest.raises(ScheduleError, match="replace the edges, then lower it"):
        Schedule([["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]]).with_edges(chain(2))


def test_text_with_a_line_of_edges():
    schedule = Schedule.from_text("edges: 0>1,2 0>1/F 1>2\n0F0 2F0\n1F0")
    assert schedule.edges == (Edge(0, (1, 2)), Edge(0, (1,), gradient=False), Edge(1, (2,)))
    with pytest.raises(ScheduleSyntaxError, match=r"row 1, cell 2: '0-2' is not an edge; write e\.g\. '0>1'"):
        Schedule.from_text("edges: 0>1 0-2\n0F0\n1F0")
    with pytest.raises(ScheduleSyntaxError, match="duplicate line of edges"):
        Schedule.from_text("edges: 0>1\nedges: 0>1\n0F0\n1F0")
    with pytest.raises(ScheduleError, match="or do not pass edges="):
        Schedule.from_text("edges: 0>1\n0F0\n1F0", edges=chain(2))
