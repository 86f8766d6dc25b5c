"""How units are cut into stages, evenly and by cost."""

from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CostsError, SizeError, SplitError
from penstock.models.partition import by_cost, by_count, repeated_units


def model(layers):
    return ["embed", *[f"layers.{number}" for number in range(layers)], "norm", "head"]


def layers_of(stage):
    return sum(name.startswith("layers.") for name in stage)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (30, 4, [7, 8, 8, 7]),
        (30, 8, [3, 4, 4, 4, 4, 4, 4, 3]),
        (32, 4, [8, 8, 8, 8]),
        (5, 2, [3, 2]),
        (5, 4, [1, 2, 1, 1]),
        (3, 3, [1, 1, 1]),
        (7, 1, [7]),
    ],
)
def test_layers_are_spread_evenly_with_more_of_them_in_the_middle(layers, stages, counts):
    layout = by_count(model(layers), stages)
    assert [layers_of(stage) for stage in layout] == counts
    assert layout[0][0] == "embed"
    assert layout[-1][-2:] == ("norm", "head")


@given(st.integers(1, 100), st.data())
def test_no_unit_is_lost_and_counts_differ_by_one_at_most(layers, data):
    units = model(layers)
    stages = data.draw(st.integers(1, len(units)))
    layout = by_count(units, stages)
    assert [unit for stage in layout for unit in stage] == units
    assert len(layout) == stages
    assert all(layout)
    counts = [layers_of(stage) if stages <= layers and layers > 1 else len(stage) for stage in layout]
    assert max(counts) - min(counts) <= 1


def test_two_lists_are_counted_and_short_ones_are_not():
    units = ["shared", "encoder.0", "encoder.1", "bridge", "decoder.0", "decoder.1", "head"]
    assert by_count(units, 2) == (("shared", "encoder.0", "encoder.1", "bridge"), ("decoder.0", "decoder.1", "head"))
    with_head = [*(f"layers.{number}" for number in range(12)), "head.0", "head.1"]
    assert repeated_units(with_head) == tuple(with_head[:12])


def test_a_predicate_says_what_counts():
    units = ["a", "b", "c", "d"]
    assert by_count(units, 2, is_layer=lambda unit: unit in "ab") == (("a",), ("b", "c", "d"))


def test_with_fewer_layers_than_stages_every_unit_counts():
    assert by_count(["embed", "layers.0", "layers.1", "head"], 4) == (
        ("embed",),
        ("layers.0",),
        ("layers.1",),
        ("head",),
    )


def test_more_stages_than_units_are_refused():
    with pytest.raises(SplitError, match=r"6 stages need at least as many units, but the model has 4: embed, .*head"):
        by_count(model(1), 6)
    with pytest.raises(SplitError, match="6 stages need"):
        by_cost(model(1), [1, 1, 1, 1], 6)


@pytest.mark.parametrize("stages", [0, -1, 2.0, True, "2"])
def test_the_number_of_stages_must_be_positive_and_whole(stages):
    with pytest.raises(SizeError, match="stages must be"):
        by_count(model(4), stages)


def every_cut(units, stages):
    for cuts in combinations(range(1, len(units)), stages - 1):
        yield tuple(tuple(units[start:end]) for start, end in pairwise([0, *cuts, len(units)]))


@given(
    st.lists(st.integers(0, 9) | st.floats(0, 9, allow_subnormal=False), min_size=1, max_size=8),
    st.data(),
)
def test_the_largest_cost_is_the_smallest_of_all_cuts(costs, data):
    units = [f"u{number}" for number in range(len(costs))]
    stages = data.draw(st.integers(1, len(units)))
    exact = dict(zip(units, map(Fraction, costs), strict=True))

    def costs_of(layout):
        return [sum(exact[unit] for unit in stage) for stage in layout]

    def rank(layout):
        return max(costs_of(layout)), sum(cost**2 for cost in costs_of(layout))

    layout = by_cost(units, costs, stages)
    assert rank(layout) == min(map(rank, every_cut(units, stages)))
    assert layout in set(every_cut(units, stages))


def test_costs_by_name_and_by_container():
    costs = {"embed": 3, "layers": 2, "layers.3": 6, "norm": 1, "head": 4}
    assert by_cost(model(4), costs, 3) == (
        ("embed", "layers.0", "layers.1"),
        ("layers.2", "layers.3"),
        ("norm", "head"),
    )


def test_one_cost_per_layer_leaves_the_rest_free():
    assert by_cost(model(4), [9, 1, 1, 1], 2) == (
        ("embed", "layers.0"),
        ("layers.1", "layers.2", "layers.3", "norm", "head"),
    )


def test_a_thousand_units_are_cut_at_once():
    units = [f"layers.{number}" for number in range(1000)]
    costs = [1 + number % 7 for number in range(1000)]
    layout = by_cost(units, costs, 64)
    assert sum(map(len, layout)) == 1000
    assert max(sum(costs[int(unit.split(".")[1])] for unit in stage) for stage in layout) <= sum(costs) / 64 + 7


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, 2, 3], "3 costs are given, but the model has 5 units, 2 of them layers: embed"),
        ({"layers.0": 1}, "no cost is given for layers.1"),
        ({"layers": 1, "lm_haed": 1}, "a cost is given for unknown unit 'lm_haed'"),
        ({"layers": 1, "haed": 1}, r"did you mean 'head'\?"),
        ([1, -2], "must not be negative, got -2"),
        ([1, float("nan")], "costs must be finite numbers"),
        ([1, float("inf")], "costs must be finite numbers"),
        ([1, None], "costs must be finite numbers"),
        (["1", "2"], "costs must be finite numbers"),
        (3, r"costs= must be a list with a number per layer, or numbers by name, got 3; write e.g. costs=\[1, 1, 2\]"),
        ("ab", "costs= must be a list with a number per layer, or numbers by name, got 'ab'"),
        ({1, 2}, r"costs= must be a list .* got \{1, 2\}"),
        ({0: 1, 1: 2}, "costs= names 0, which is not the name of a module; write e.g. costs="),
    ],
)
def test_bad_costs_are_refused(costs, message):
    with pytest.raises(CostsError, match=message):
        by_cost(model(2), costs, 2)


@pytest.mark.parametrize("costs", [np.array([1.0, 3.0]), iter([1, 3])])
def test_costs_may_be_an_array_or_an_iterator(costs):
    assert by_cost(model(2), costs, 2) == (("embed", "layers.0"), ("layers.1", "norm", "head"))
