"""Phases for more microbatches than there are give the same row as all of them, cut afterwards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import packed
from penstock.schedules import dual_pipe_v, zbv_zero_bubble
from penstock.schedules.interleaving import drop_padding
from penstock.schedules.phases import expand_phases


@pytest.mark.parametrize("schedule", [dual_pipe_v, zbv_zero_bubble], ids=["DualPipeV", "ZB-V"])
@given(data=st.data(), ranks=st.integers(1, 12))
def test_what_is_not_there_is_left_out(schedule, data, ranks):
    rank = data.draw(st.integers(0, ranks - 1))
    whole = data.draw(st.integers(2 * ranks, 3 * ranks))
    microbatches = data.draw(st.integers(1, whole))
    phases = list(schedule._phases(rank, ranks, whole))
    (everything,) = expand_phases([phases], whole)
    assert len(everything) >= 4 * whole
    expected = drop_padding(everything, microbatches)
    assert packed.unpack_cells(*expand_phases([phases], microbatches)) == packed.unpack_cells(expected)


def test_one_queue_of_weight_gradients_pays_in_the_order_of_the_input_gradients():
    phases = [("F0 F1", 3), ("I1 I0", 2), ("I1 W", 1), ("I0", 1), ("W", 5)]
    row = packed.unpack_cells(*expand_phases([phases], 3))
    inputs = [str(action).replace("I", "W") for action in row if action.computation_type.value == "I"]
    assert [str(action) for action in row if action.computation_type.value == "W"] == inputs
    assert inputs == ["1W0", "0W0", "1W1", "0W1", "1W2", "0W2"]
