"""The comparison of all schedules: ranked by what counts, not by rounding."""

import pytest

import penstock as ps
from penstock.simulation.comparison import candidates, rank_candidates


def names(costs, **options):
    return [candidate.name for candidate in rank_candidates(list(candidates(4, 8, costs, **options)))]


@pytest.mark.parametrize("unit", [1, 0.1, 0.3])
def test_the_unit_does_not_matter(unit):
    costs = ps.Costs(forward=unit, backward_input=unit, backward_weight=unit)
    assert names(costs) == names(ps.Costs())


def test_of_equally_fast_ones_the_smaller_comes_first():
    found = names(ps.Costs())
    assert found.index("1F1B") < found.index("GPipe")


def test_what_just_fits_fits():
    found = {candidate.name: candidate for candidate in candidates(4, 50, ps.Costs(activation=0.3), memory_limit=1.2)}
    assert not found["ZB-H1"].reason
    assert found["ZB-H1"].peak_memory == pytest.approx(1.2)
    assert found["GPipe"].reason == "rank 0 holds 15, but the limit is 1.2"


def test_bad_arguments():
    for arguments, words in (
        ({"costs": {}}, "costs must be Costs"),
        ({"memory_limit": float("nan")}, "memory_limit must be a finite number"),
        ({"memory_limit": -1}, "memory_limit must be a finite number"),
    ):
        with pytest.raises(ps.PenstockError, match=words):
            list(candidates(4, 8, **arguments))


def test_a_better_order_for_the_costs_is_there_beside_the_plain_one():
    assert not any("fitted" in name for name in names(ps.Costs()))
    costs = ps.Costs(forward=4, backward_input=4, backward_weight=2)
    found = {candidate.name: candidate for candidate in candidates(4, 8, costs)}
    plain, fitted = found["ZBVZeroBubble"], found["ZBVZeroBubble, fitted"]
    assert fitted.timeline.span < plain.timeline.span
    assert fitted.peak_memory <= plain.peak_memory
    alone = ps.build("ZBVZeroBubble", ranks=4, microbatches=8, costs=costs.of_ranks(plain.timeline.schedule.placement))
    assert fitted.timeline.schedule == alone
