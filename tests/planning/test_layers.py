"""Layers become stages: what layers cost adds up, and cuts become edges."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, SizeError
from penstock.planning.layers import Partition, count_layers, stage_costs
from penstock.simulation.costs import OF_A_STAGE, OF_AN_EDGE

LAYERS = 7
numbers = st.just(0.0) | st.floats(1e-3, 1e3)
positive = st.floats(1e-3, 1e3)
shares = st.floats(1e-3, 1)


def amounts(each, count):
    return each | st.lists(each, min_size=count, max_size=count)


@st.composite
def layer_costs(draw, layers=LAYERS):
    fields = {field: draw(amounts(numbers, layers)) for field in OF_A_STAGE}
    optional = draw(st.sets(st.sampled_from(["backward", "recompute", "recompute_activation"])))
    fields = {field: value for field, value in fields.items() if field not in optional}
    fields |= {field: draw(amounts(positive, layers - 1)) for field in OF_AN_EDGE}
    return ps.Costs(**fields, input_release=draw(amounts(shares, layers)), dispatch=draw(numbers))


def partitions(layers=LAYERS):
    cuts = st.sets(st.integers(1, layers - 1))
    return cuts.map(lambda chosen: Partition((0, *sorted(chosen), layers)))


@settings(max_examples=40)
@given(layer_costs(), partitions())
def test_every_field_of_a_stage_is_the_sum_over_its_layers(costs, partition):
    grouped = stage_costs(costs, partition)
    for field in OF_A_STAGE:
        if getattr(costs, field) is None:
            assert getattr(grouped, field) is None
        if getattr(costs, field) is None and field == "recompute_activation":
            continue
        each = costs.per_stage(field, LAYERS)
        expected = [math.fsum(each[begin:end]) for begin, end in pairwise(partition.bounds)]
        found = grouped.per_stage(field, partition.stages)
        if field in ("backward_input", "backward_weight") and not costs.per_stage("backward_input", LAYERS)[0]:
            found, expected = found[1:], expected[1:]  # in the first stage, I may be part of W
        assert found == pytest.approx(expected, rel=1e-14)


@settings(max_examples=40)
@given(layer_costs(), partitions())
def test_an_edge_costs_what_its_cut_does(costs, partition):
    grouped = stage_costs(costs, partition)
    for field in OF_AN_EDGE:
        if getattr(grouped, field) is None:
            assert (field, partition.stages) == ("bandwidth", 1)
            continue
        each = costs.per_edge(field, LAYERS - 1)
        expected = [each[cut - 1] for cut in partition.cuts]
        assert grouped.per_edge(field, partition.stages - 1).tolist() == expected


@settings(max_examples=40)
@given(layer_costs(), partitions())
def test_what_inputs_release_is_the_sum_of_what_the_layers_release(costs, partition):
    grouped = stage_costs(costs, partition)
    released = costs.per_stage("activation", LAYERS) * costs.per_stage("input_release", LAYERS)
    expected = np.add.reduceat(released, partition.bounds[:-1])
    stages = partition.stages
    found = grouped.per_stage("activation", stages) * grouped.per_stage("input_release", stages)
    assert found == pytest.approx(expected, rel=1e-12)


@settings(max_examples=40)
@given(layer_costs())
def test_one_layer_per_stage_gives_the_same_costs_back(costs):
    assert stage_costs(costs, Partition.even(LAYERS, LAYERS)) == costs


@settings(max_examples=40)
@given(layer_costs(), partitions(), partitions())
def test_grouping_twice_is_grouping_once(costs, fine, other):
    coarse = Partition((0, *sorted(set(fine.cuts) & set(other.cuts)), LAYERS))
    of_stages = Partition(tuple(fine.bounds.index(bound) for bound in coarse.bounds))
    twice, once = stage_costs(stage_costs(costs, fine), of_stages), stage_costs(costs, coarse)
    for field in OF_A_STAGE:
        if field != "recompute_activation":
            assert twice.per_stage(field, coarse.stages) == pytest.approx(once.per_stage(field, coarse.stages))


def test_a_share_is_weighted_with_the_activations():
    costs = ps.Costs(activation=[1, 3, 0, 0], input_release=[0.2, 0.6, 0.1, 0.3])
    assert stage_costs(costs, Partition((0, 2, 4))).input_release == pytest.approx((0.5, 0.2))


def test_cuts_that_carry_no_bytes_need_no_bandwidth():
    costs = ps.Costs(forward=[1, 1, 1], activation_bytes=[4, 0], bandwidth=2)
    assert stage_costs(costs, Partition((0, 2, 3))).bandwidth is None
    assert stage_costs(costs, Partition((0, 1, 3))).bandwidth == 2


def test_all_of_the_backward_of_the_first_stage_is_w_if_no_gradient_leaves_it():
    costs = ps.Costs(backward_input=[0, 2, 3, 4], backward_weight=[1, 1, 1, 1])
    grouped = stage_costs(costs, Partition((0, 2, 4)))
    assert (grouped.backward_input, grouped.backward_weight) == ((0, 7), (4, 2))
    assert grouped.per_stage("backward", 2).tolist() == [4, 9]
    elsewhere = ps.Costs(backward_input=[1, 2, 0, 4], backward_weight=1)
    assert stage_costs(elsewhere, Partition((0, 2, 4))).backward_input == (3, 4)


def test_a_number_stands_for_every_layer():
    grouped = stage_costs(ps.Costs(forward=2, latency=0.5), Partition((0, 1, 4)))
    assert grouped.forward == (2.0, 6.0)
    assert grouped.latency == 0.5


def test_the_middle_gets_what_is_left_over():
    assert Partition.even(11, 4).sizes == (3, 3, 3, 2)
    assert Partition.even(9, 4).sizes == (2, 3, 2, 2)
    assert [Partition.even(8, 4).stage_of(layer) for layer in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_layers_are_counted_from_stages_or_edges():
    assert count_layers(ps.Costs(static=[1, 2, 3])) == 3
    assert count_layers(ps.Costs(latency=[1, 2, 3])) == 4
    with pytest.raises(CostsError, match="pass layers="):
        count_layers(ps.Costs())
    with pytest.raises(CostsError, match="static has 2 numbers, but there are 3 stages"):
        count_layers(ps.Costs(forward=[1, 2, 3], static=[1, 2]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Partition.even(3, 4), "4 stages need at least 4 layers, but there are 3; use at most 3 stages"),
        (lambda: Partition((0, 2, 2, 4)), "stage 1 would begin at layer 2 and end before layer 2"),
        (lambda: Partition((1, 2)), r"e.g. \(0, 3, 6\), got \(1, 2\)"),
        (lambda: Partition((0,)), "bounds must be 0"),
        (lambda: Partition((0, 1.5)), "bounds must be an integer, got 1.5"),
        (lambda: Partition((0, 2)).group(["a"]), "1 names are given for 2 layers"),
        (lambda: stage_costs(ps.Costs(forward=[1, 2]), Partition((0, 3))), "forward has 2 numbers"),
    ],
)
def test_mistakes_are_named(build, message):
    with pytest.raises((SizeError, CostsError), match=message):
        build()
