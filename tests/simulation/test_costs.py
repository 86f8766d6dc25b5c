"""Costs: right ones survive a file, wrong ones say which field."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps

numbers = st.just(0.0) | st.floats(1e-12, 1e12)
amounts = numbers | st.lists(numbers, min_size=1, max_size=5)
costs = st.builds(
    ps.Costs,
    forward=amounts,
    backward=st.none() | amounts,
    latency=amounts,
    static=amounts,
    input_release=st.just(0.0) | st.floats(1e-9, 1),
    dispatch=numbers,
    recompute=st.none() | amounts,
    recompute_activation=st.none() | amounts,
)


@given(costs, st.sampled_from([".toml", ".json"]))
def test_a_file_gives_back_what_was_written(tmp_path_factory, given, suffix):
    path = tmp_path_factory.mktemp("costs") / f"costs{suffix}"
    given.write(path)
    assert ps.Costs.read(path) == given


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text("# milliseconds\nforward = [3, 2, 2, 4]\nbackward_input = 2\nlatency = 0.1\n")
    read = ps.Costs.read(path)
    assert read == ps.Costs(forward=(3, 2, 2, 4), backward_input=2.0, latency=0.1)
    assert read.per_stage("backward", 4).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"forward": -1}, "forward", "forward must be at least 0, got -1"),
        ({"forward": [1, -1]}, "forward", r"forward\[1\] must be at least 0, got -1"),
        ({"backward": math.nan}, "backward", "backward must be finite, got nan"),
        ({"latency": math.inf}, "latency", "latency must be finite, got inf"),
        ({"forward": "1"}, "forward", "forward must be a number, got '1'"),
        ({"forward": True}, "forward", "forward must be a number, got True"),
        ({"forward": None}, "forward", "forward must be a number, got None"),
        ({"forward": {1, 2}}, "forward", "forward must be a number"),
        ({"forward": 1 + 2j}, "forward", "forward must be a number"),
        ({"forward": bytearray(b"12")}, "forward", "forward must be a number"),
        ({"forward": [[1]]}, "forward", r"forward\[0\] must be a number, got \[1\]"),
        ({"forward": {"0": 1}}, "forward", "forward must be a number"),
        ({"forward": 10**400}, "forward", "forward must be a number"),
        ({"forward": 1e308}, "forward", "forward must be between 1e-100 and 1e100"),
        ({"bandwidth": 1e-300, "activation_bytes": 1}, "bandwidth", "bandwidth must be between"),
        ({"bandwidth": 0, "activation_bytes": 1}, "bandwidth", "bandwidth must be more than 0"),
        ({"bandwidth": 3}, "activation_bytes", "bandwidth has no effect without activation_bytes"),
        ({"activation_bytes": 3}, "bandwidth", "no effect without bandwidth"),
        ({"overlap": 0}, "overlap", "overlap must be more than 0"),
        ({"overlap": [1, 1]}, "overlap", "overlap must be a single number"),
        ({"input_release": 1.5}, "input_release", "input_release must be a share"),
        ({"foward": 1}, "foward", "unknown field 'foward' of costs; did you mean 'forward'"),
        ({"price": 1}, "price", "unknown field 'price' of costs; the fields are forward,"),
    ],
)
def test_bad_fields_are_named(tmp_path, fields, field, words):
    with pytest.raises(ps.CostsError, match=words) as caught:
        ps.Costs.from_dict(fields)
    assert caught.value.field == field
    if all(isinstance(value, (int, float, list, str, dict)) for value in fields.values()):
        path = tmp_path / "costs.json"
        path.write_text(json.dumps(fields))
        with pytest.raises((ps.CostsError, ps.FormatError), match=r"costs\.json"):
            ps.Costs.read(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"forward": (1, 2, 3)}, "forward has 3 numbers, but there are 4 stages"),
        ({"latency": (1, 2, 3, 4)}, "latency has 4 numbers, but there are 3 edges"),
        ({"activation": (1,)}, "activation has 1 number, but there are 4 stages"),
        ({"optimizer": (1,)}, "optimizer has 1 number, but"),
    ],
)
def test_too_few_stages(fields, words):
    schedule = ps.build("1F1B", ranks=4, microbatches=4)
    with pytest.raises(ps.CostsError, match=words):
        ps.simulate(schedule, ps.Costs(**fields))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("costs.toml", "forward = ", "costs.toml: is damaged"),
        ("costs.json", "{", "costs.json: is damaged"),
        ("costs.json", "[1]", "costs must be a table of fields"),
        ("costs.json", "[" * 100_000, "costs.json: is damaged"),
        ("costs.toml", "\xff\0", "is not text"),
        ("costs.yaml", "forward: 1", r"costs must be in a \*.toml or \*.json file"),
    ],
)
def test_unreadable_files(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ps.ReadError, match=words):
        ps.Costs.read(path)


def test_no_file(tmp_path):
    with pytest.raises(ps.ReadError, match=r"none.toml: cannot be read: No such file"):
        ps.Costs.read(tmp_path / "none.toml")
    with pytest.raises(ps.WriteError, match="cannot be written"):
        ps.Costs().write(tmp_path / "no" / "costs.toml")
    with pytest.raises(ps.WriteError, match=r"\*.toml or \*.json"):
        ps.Costs().write(tmp_path / "costs.txt")


def test_numpy_numbers_become_plain_ones():
    given = ps.Costs(forward=np.array([1, 2]), latency=np.float32(0.5))
    assert given == ps.Costs(forward=(1.0, 2.0), latency=0.5)
    assert ps.Costs(forward=np.array(2)).forward == 2.0
    assert hash(given) == hash(ps.Costs(forward=(1.0, 2.0), latency=0.5))


@pytest.mark.parametrize("schedule", ["1F1B", None, 3])
def test_what_cannot_be_simulated(schedule):
    with pytest.raises(ps.ScheduleError, match="expected a Schedule"):
        ps.simulate(schedule)


def test_what_is_not_costs_or_a_model():
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    with pytest.raises(ps.CostsError, match="costs must be Costs"):
        ps.simulate(schedule, {"forward": 1})
    for model in ("eager", ["eager"]):
        with pytest.raises(ps.ModelError, match="model must be a CommModel"):
            ps.simulate(schedule, model=model)
    with pytest.raises(ps.CostsError, match="'bandwidth' is not a per-stage field"):
        ps.Costs().per_stage("bandwidth", 4)
    with pytest.raises(ps.SizeError, match="steps must be at least 1"):
        ps.simulate(schedule, steps=0)
    with pytest.raises(ps.VerificationError, match="1B0 is missing"):
        ps.simulate(ps.Schedule([["0F0", "0B0"], ["1F0"]]))


def test_stages_that_recompute_take_longer_and_keep_less():
    given = ps.Costs(
        forward=[1, 2, 3], backward_input=4, backward_weight=5, activation=8, recompute_activation=[1, 2, 3]
    )
    changed = given.with_recomputation([True, False, True])
    assert changed.backward_input == (5, 4, 7)
    assert changed.per_stage("backward", 3).tolist() == [10, 9, 12]
    assert changed.activation == (1, 8, 3)
    assert changed.forward == given.forward
    assert changed.recompute is changed.recompute_activation is None


def test_recomputation_counts_in_a_backward_that_is_given_too():
    given = ps.Costs(backward=7, recompute=[0.5, 2], recompute_activation=0)
    assert given.with_recomputation([True, True]).backward == (7.5, 9)
    assert given.with_recomputation([False, False]).per_stage("backward", 2).tolist() == [7, 7]


def test_a_rank_shares_what_recomputation_costs_among_its_stages():
    costs = ps.Costs(recompute=4, recompute_activation=[2, 6]).of_ranks(ps.Placement.v(2, 4))
    assert (costs.recompute, costs.recompute_activation) == ((2, 2, 2, 2), (1, 3, 3, 1))


def test_recomputation_needs_to_know_what_remains_in_memory():
    with pytest.raises(ps.CostsError, match="recompute_activation"):
        ps.Costs(recompute=1).with_recomputation([False, True])
    assert ps.Costs(recompute=1).with_recomputation([False, False]).activation == (1, 1)
