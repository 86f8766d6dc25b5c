import pytest
from hypothesis import given
from hypothesis import strategies as st

import interpreter
from penstock import Schedule, ScheduleError
from penstock.ir.alignment import unit_steps
from penstock.schedules.registry import RECIPES, build


def text_rows(schedule):
    return [["" if cell is None else str(cell) for cell in row] for row in schedule.actions]


def starts_by_oracle(schedule):
    """The interpreter gives an overlap the time of both; here every cell takes one step, so they are taken apart."""
    unit = interpreter.Costs(1, 1, 1)
    rows = [[cell.replace("B", "I") for cell in row] for row in text_rows(schedule)]
    return interpreter.run(rows, schedule.stages, unit).starts


@pytest.mark.parametrize("name", [recipe.name for recipe in RECIPES if recipe.name != "DualPipeV"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 5), (4, 8), (5, 3)])
def test_columns_are_the_starts_in_unit_time(name, ranks, microbatches):
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    assert unit_steps(schedule) == starts_by_oracle(schedule)


@given(st.permutations([f"0{kind}{number}" for kind in "FIW" for number in range(2)]), st.data())
def test_it_is_stuck_exactly_if_the_interpreter_is(first, data):
    second = data.draw(st.permutations([f"1{kind}{number}" for kind in "FB" for number in range(2)]))
    schedule = Schedule([first, [None, *second]])
    try:
        expected = starts_by_oracle(schedule)
    except interpreter.StuckError:
        with pytest.raises(ScheduleError, match="waits forever"):
            unit_steps(schedule)
    else:
        assert unit_steps(schedule) == expected


def test_an_overlap_waits_for_all_that_it_holds():
    schedule = Schedule([["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B"], ["1F0", "1I0", "(1F1;1W0)OVERLAP_F_B", "1B1"]])
    assert unit_steps(schedule) == [[0, 1, 3], [1, 2, 3, 4]]


def test_what_runs_together_cannot_wait_for_each_other():
    with pytest.raises(ScheduleError, match="waits forever"):
        unit_steps(Schedule([["(0F0;0B0)OVERLAP_F_B"]]))


def test_long_chains_do_not_recurse():
    ranks, microbatches = 300, 2
    columns = unit_steps(build("1F1B", ranks=ranks, microbatches=microbatches))
    assert columns[0][-1] == 2 * ranks + 2 * (microbatches - 1) - 1
