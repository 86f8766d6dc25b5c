"""A timeline in the terminal: the picture is the test."""

from textwrap import dedent

import numpy as np
import pytest

from penstock import Costs, Schedule, build, lower, simulate
from penstock.view.bars import NAMES, bars_of, shares
from penstock.view.palette import IDLE, STYLES
from penstock.view.terminal import Segment, draw, plain


def test_one_f_one_b():
    timeline = simulate(build("1F1B", ranks=2, microbatches=3))

    assert plain(timeline, 42) == picture("""
               busy peak
        rank 0  75%    2 F0F1....B0--F2B1--..B2--
        rank 1  75%    1 ..F0B0--F1B1--F2B2--....
        time             0   2   4   6   8   10
        # F forward   B backward   . idle
    """)


def test_unequal_costs():
    schedule = build("1F1B", ranks=2, microbatches=3)
    timeline = simulate(schedule, Costs(forward=[1, 2], backward=[3, 1.5], latency=0.5))

    assert plain(timeline, 66) == picture("""
               busy peak
        rank 0  71%    2 F0F1.......B0----F2B1----...B2----
        rank 1  62%    1 ...F0--B0-F1--B1-...F2--B2-.......
        time             0   2   4   6   8   10  12  14  16
        # F forward   B backward   . idle
    """)


def test_times_without_a_unit_fill_the_width():
    timeline = simulate(build("1F1B", ranks=2, microbatches=1), Costs(forward=[1, 1.37], latency=0.231))

    assert plain(timeline, 50) == picture("""
               busy peak
        rank 0  44%    1 F0---..................B0--------
        rank 1  49%    1 ......F0-----B0-------...........
        time             0    1    2   3    4    5    6
        # F forward   B backward   . idle
    """)


def test_stages_are_reported_apart_where_there_is_room():
    timeline = simulate(build("ZBVZeroBubble", ranks=2, microbatches=2))

    assert plain(timeline, 80) == picture("""
               busy peak
        rank 0  86%    3 0F0-0F1-....3F0-3I0-3W0-3F1-3I1-3W1-0I0-0W0-....0I1-0W1-
        rank 1  86%    4 ....1F0-2F0-1F1-2F1-2I0-2W0-1I0-1W0-2I1-2W1-1I1-1W1-....
        time             0   1   2   3   4   5   6   7   8   9   10  11  12  13  14
        # F forward   I input gradient   W weight gradient   . idle
    """)
    assert "F0-F1-" in plain(timeline, 60)


def test_an_overlap_names_both_microbatches():
    timeline = simulate(build("DualPipeV", ranks=2, microbatches=4))

    assert "O2+0" in plain(timeline, 150)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("width", [20, 40, 61, 80, 200])
def test_it_fits(name, width):
    timeline = simulate(lower(build(name, ranks=4, microbatches=8)), Costs(unshard=0.3, reduce=0.7, latency=0.11))

    assert max(map(len, plain(timeline, width).splitlines())) <= width


def test_columns_show_what_runs_most_of_the_time():
    blocks = bars_of(simulate(build("1F1B", ranks=2, microbatches=3)))
    taken = shares(blocks, 7)

    assert taken.sum(axis=2) == pytest.approx(np.full((2, 7), 12 / 7))
    assert taken[0, :, NAMES.index("F")].sum() == pytest.approx(3)
    assert taken[0, :, NAMES.index("B")].sum() == pytest.approx(6)
    assert taken[0, :, NAMES.index(IDLE)].sum() == pytest.approx(3)


def test_colour_is_data():
    lines = draw(simulate(build("1F1B", ranks=2, microbatches=3)), 42, colour=True)

    assert Segment("F0", "F") in lines[1]
    assert Segment("B0  ", "B") in lines[1]
    assert Segment("....", IDLE) in lines[1]
    assert {segment.style for line in lines for segment in line} <= {"", "dim", *STYLES}


def test_letters_are_different():
    letters = [style.letter for style in STYLES.values()]

    assert len(set(letters)) == len(letters)


def test_several_steps_count_microbatches_from_0():
    timeline = simulate(build("1F1B", ranks=2, microbatches=2), steps=2)

    assert "F3" not in plain(timeline, 120)
    assert plain(timeline, 120).splitlines()[1].count("F1") == 2


def test_nothing_takes_time():
    free = Costs(forward=0, backward_input=0, backward_weight=0)

    assert "F" not in plain(simulate(build("GPipe", ranks=2, microbatches=2), free), 40)


def test_one_rank_alone_is_never_idle():
    schedule = Schedule([["0F0", "0B0"]])

    assert plain(simulate(schedule), 60).splitlines()[1].startswith("rank 0 100%    1 F0")


def test_large_ones_are_fast():
    timeline = simulate(build("1F1B", ranks=64, microbatches=512))
    drawn = plain(timeline, 200)

    assert len(drawn.splitlines()) == 67


def picture(text: str) -> str:
    return dedent(text).strip("\n")
