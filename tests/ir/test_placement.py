import pytest

from penstock import Placement, PlacementError, SizeError


def test_loop():
    placement = Placement.loop(ranks=3, stages=7)
    assert placement.rank_of == (0, 1, 2, 0, 1, 2, 0)
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]
    assert placement.rows == ((0, 3, 6), (1, 4), (2, 5))
    assert placement.stages == 7


def test_v_goes_there_and_back():
    assert Placement.v(ranks=3, stages=6).rank_of == (0, 1, 2, 2, 1, 0)
    assert Placement.v(ranks=2, stages=8).rank_of == (0, 1, 1, 0, 0, 1, 1, 0)
    assert Placement.v(ranks=1, stages=2).rank_of == (0, 0)


def test_explicit_and_unequal():
    rows = Placement.from_rows([[4, 0, 1], [3, 2]])
    assert rows == Placement.from_mapping({0: 0, 1: 0, 2: 1, 3: 1, 4: 0})
    assert rows.stages_of(0) == (0, 1, 4)
    assert hash(rows) == hash(Placement((0, 0, 1, 1, 0), 2))


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda: Placement.from_rows([[0, 1], [1, 2]]), "stage 1 is on rank 0 and on rank 1"),
        (lambda: Placement.from_rows([[0], [2]]), "no rank holds stage 1"),
        (lambda: Placement.from_mapping({0: 0, 10**12: 1}), "no rank holds stage 1"),
        (lambda: Placement.from_mapping({-1: 0}), "no rank holds stage 0"),
        (lambda: Placement((0, 2), 2), "stage 1 is placed on rank 2, but the ranks are 0 to 1"),
        (lambda: Placement((0, -1), 2), "stage 1 is placed on rank -1"),
    ],
)
def test_impossible_placements(make, reported):
    with pytest.raises(PlacementError, match=reported):
        make()


def test_a_rank_may_hold_nothing():
    assert Placement.from_rows([[0], []]).stages_of(1) == ()


@pytest.mark.parametrize("make", [Placement.loop, Placement.v])
def test_sizes(make):
    with pytest.raises(SizeError, match="ranks must be at least 1, got 0"):
        make(0, 4)
    with pytest.raises(SizeError, match="stages must be at least 0, got -1"):
        make(2, -1)
