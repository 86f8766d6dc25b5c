from textwrap import dedent

import pytest
from hypothesis import given

from penstock import Placement, Schedule, ScheduleError, ScheduleSyntaxError
from penstock.ir.grid import draw
from strategies import schedules


def picture(text):
    return dedent(text).strip("\n")


def test_rows_of_unequal_length_as_written():
    assert Schedule([["0F0", None, "0B0"], ["1F0"]]).grid() == picture("""
        step   0   1 2
        rank 0 0F0 . 0B0
        rank 1 1F0
    """)


def test_fewer_steps_than_ranks():
    assert Schedule([["0F0"], ["1F0"], ["2F0"]]).grid(aligned=False) == picture("""
        step   0
        rank 0 0F0
        rank 1 1F0
        rank 2 2F0
    """)


def test_one_rank():
    assert Schedule([["0F0", "0B0"]]).grid() == picture("""
        step   0   1
        rank 0 0F0 0B0
    """)


def test_ten_ranks_line_up():
    grid = Schedule([[f"{stage}F0"] for stage in range(11)]).grid(aligned=False)
    assert grid.splitlines()[0] == "step    0"
    assert grid.splitlines()[1] == "rank 0  0F0"
    assert grid.splitlines()[11] == "rank 10 10F0"


def test_without_idle_steps_it_is_aligned():
    schedule = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    assert schedule.grid() == picture("""
        step   0   1   2   3   4   5
        rank 0 0F0 0F1 .   0B0 .   0B1
        rank 1 .   1F0 1B0 1F1 1B1
    """)
    assert schedule.grid(aligned=False) == picture("""
        step   0   1   2   3
        rank 0 0F0 0F1 0B0 0B1
        rank 1 1F0 1B0 1F1 1B1
    """)


def test_aligning_drops_idle_steps_that_were_written():
    schedule = Schedule([["0F0", None, None, None, None, "0B0"], ["1F0", None, "1B0"]])
    assert schedule.grid(aligned=True) == picture("""
        step   0   1   2   3
        rank 0 0F0 .   .   0B0
        rank 1 .   1F0 1B0
    """)


def test_the_mark_points_at_a_step_as_written():
    schedule = Schedule([["0F0", "0B0"], ["(1F10;1B0)OVERLAP_F_B", "1F0"]])
    assert schedule.grid(mark=(1, 1), message="comes too late") == picture("""
        step   0                     1
        rank 0 0F0                   0B0
        rank 1 (1F10;1B0)OVERLAP_F_B 1F0
                                     ^^^ comes too late
    """)


def test_the_mark_in_an_aligned_grid():
    schedule = Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    assert schedule.grid(mark=(0, 1), aligned=True) == picture("""
        step   0   1   2   3
        rank 0 0F0 .   .   0B0
                           ^^^
        rank 1 .   1F0 1B0
    """)


def test_folded_into_a_width_every_block_has_its_own_marks():
    schedule = Schedule([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F0"]])
    assert draw(schedule, mark=[(0, 0), (0, 3), (1, 1)], width=24) == picture("""
        step   0        1
        rank 0 0F0      0SEND_F0
               ^^^^^^^^
        rank 1 1RECV_F0 1RECV_F1
                        ^^^^^^^^

        step   2   3
        rank 0 0F1 0SEND_F1
                   ^^^^^^^^
        rank 1 1F0
    """)
    assert draw(schedule, width=200) == schedule.grid()
    assert draw(schedule, width=1).count("step") == 4


@pytest.mark.parametrize("mark", [(0, 2), (0, -1)])
def test_a_mark_that_is_not_there(mark):
    with pytest.raises(ScheduleError, match="cannot mark"):
        Schedule([["0F0", "0B0"]]).grid(mark=mark)


def test_several_marks_and_a_message_of_several_lines():
    schedule = Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    assert schedule.grid(mark=[(0, 0), (0, 1), (1, 1)], message="two\nlines") == picture("""
        step   0   1
        rank 0 0F0 0B0
               ^^^ ^^^ two lines
        rank 1 1F0 1B0
                   ^^^ two lines
    """)
    assert schedule.grid(mark=[], aligned=False) == schedule.grid(aligned=False)


@pytest.mark.parametrize("wrong", [{"ranks": range(5)}, {"mark": (7, 0)}])
def test_ranks_that_are_not_there(wrong):
    with pytest.raises(ScheduleError, match="cannot draw rank"):
        Schedule([["0F0"], ["1F0"]]).grid(**wrong)


def test_a_window_of_a_large_schedule_unpacks_only_the_window():
    schedule = Schedule([["0F0", *["0B0"] * 200_000]])
    assert schedule.grid(aligned=False, steps=range(100_000, 100_002)).splitlines()[1] == "rank 0 0B0    0B0"
    assert schedule._rows == {}


def test_a_window():
    schedule = Schedule([[f"{rank}F{number}" for number in range(100)] for rank in range(4)])
    assert schedule.grid(aligned=False, ranks=range(1, 3), steps=range(98, 200)) == picture("""
        step   98   99
        rank 1 1F98 1F99
        rank 2 2F98 2F99
    """)


def test_one_that_cannot_run_is_drawn_as_written():
    stuck = Schedule([["0B0", "0F0"], ["1F0", "1B0"]])
    assert stuck.grid() == stuck.grid(aligned=False)
    with pytest.raises(ScheduleError, match="rank 0 waits forever at step 0: 0B0 needs 0F0, 1B0 or 1I0"):
        stuck.grid(aligned=True)


def test_a_lowered_one_is_drawn_as_written():
    lowered = Schedule([["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]])
    assert lowered.grid() == picture("""
        step   0        1
        rank 0 0F0      0SEND_F0
        rank 1 1RECV_F0 1F0
    """)
    with pytest.raises(ScheduleError, match="only a compute-only schedule can be aligned"):
        lowered.grid(aligned=True)


def test_a_rank_without_any_step():
    assert Schedule([["0F0"], []], placement=Placement((0,), 2)).grid() == picture("""
        step   0
        rank 0 0F0
        rank 1
    """)


@given(schedules())
def test_a_grid_as_written_reads_back(schedule):
    assert Schedule.from_text(schedule.grid(aligned=False)) == schedule


@pytest.mark.parametrize(
    ("text", "place", "reported"),
    [
        ("rank 0: 0F0 0Q0", (1, 2), "'0Q0' is not an action"),
        ("0F0\n\n1F0 2F0garbage", (3, 2), "'2F0garbage' is not an action"),
        ("rank 0: 0F0\nrank 0: 1F0", (2, None), "duplicate row for rank 0"),
        ("rank 0: 0F0\n1F0", (2, None), "label every row with its rank"),
        ("rank 0: 0F0\nrank 2: 1F0", (None, None), "rank 1 has none"),
        ("rank 7: 0F0", (None, None), "rank 0 has none"),
        ("", (None, None), "no rows found"),
        ("# nothing\nstep 0 1", (None, None), "no rows found"),
        ("rankle 0: 0F0", (1, 1), "'rankle' is not a row label; write e.g. 'rank 0: 0F0 0B0'"),
        ("rank0: 0F0", (1, 1), "'rank0:' is not a row label"),
        ("0F0 -", (1, 2), "'-' is not an action"),
        ("0f0", (1, 1), "'0f0' is not an action; write e.g. '0F0'"),
        (b"0F0", (None, None), "a grid must be text"),
    ],
)
def test_text_that_is_no_grid(text, place, reported):
    with pytest.raises(ScheduleSyntaxError, match=reported) as caught:
        Schedule.from_text(text)
    assert (caught.value.row, caught.value.cell) == place


def test_labels_may_be_written_in_many_ways():
    plain = Schedule.from_text("0F0 0B0\n1F0 1B0")
    assert Schedule.from_text("RANK 1 :1F0 1B0\r\nrank\t0\t0F0   0B0\r\n") == plain
    assert Schedule.from_text("steps: 0 1\nrank 0  0F0 0B0\nrank 1  1F0 1B0") == plain
