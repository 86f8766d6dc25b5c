"""Layouts by name, and as plain data."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SplitError
from penstock.models.layout import by_names, from_dict, from_yaml, to_dict, to_yaml

UNITS = ["model.embed", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "head"]
GLUE = ["model", "model.rotary", "model.layers", "model.drop.inner"]


def test_names_are_sorted_in_call_order_within_a_stage():
    layout = by_names(
        [["model.layers.1", "model.embed", "model.layers.0"], ["head", "model.layers.2", "model.norm"]], UNITS
    )
    assert layout == (
        ("model.embed", "model.layers.0", "model.layers.1"),
        ("model.layers.2", "model.norm", "head"),
    )


def test_a_container_stands_for_its_units():
    assert by_names([["model.embed"], ["model.layers"], ["model.norm", "head"]], UNITS)[1] == tuple(UNITS[1:4])
    assert by_names([["model"], ["head"]], UNITS) == (tuple(UNITS[:5]), ("head",))


def test_stages_need_not_be_runs_of_the_call_order():
    layout = by_names(
        [["model.layers.0", "model.layers.2", "head"], ["model.embed", "model.layers.1", "model.norm"]], UNITS
    )
    assert layout[0] == ("model.layers.0", "model.layers.2", "head")


def test_glue_may_be_named_on_any_number_of_stages():
    given = [["model.embed", "model.rotary"], ["model.layers", "model.rotary", "model.drop"], ["model.norm", "head"]]
    assert by_names(given, UNITS, glue=GLUE) == (("model.embed",), tuple(UNITS[1:4]), ("model.norm", "head"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([["model.embed", "layers.1"], []], r"unknown module 'layers.1' on stage 0; did you mean 'model.layers.1'\?"),
        ([["model.embde"]], r"unknown module 'model.embde' on stage 0; did you mean 'model.embed'"),
        ([["model"], ["hed"]], r"unknown module 'hed' on stage 1; did you mean 'head'\?"),
        ([["xyz"]], "unknown module 'xyz' on stage 0; known are model.embed, .*head$"),
        ([["model", "head"], ["head"]], "'head' is named twice: on stages 0, 1$"),
        ([["model", "head", "head"]], "'head' is named twice: on stage 0$"),
        ([["model", "model.layers"], ["head"]], "'model.layers.0' is named twice: on stage 0, and 2 more"),
        ([["model.embed", "model.norm"], ["head"]], "leaves out model.layers.0, model.layers.1, model.layers.2; every"),
        ([["model"], [], ["head"]], "stage 1 is empty"),
        ([["model"], ["model.rotary"], ["head"]], "stage 1 is empty"),
        ([["model"], *[[]] * 6, ["head"]], "the layout has 8 stages, but the model only 6 units"),
        ([["model.layers.0.attention"]], "is inside 'model.layers.0', which is not divided; name 'model.layers.0'"),
        (["model", "head"], "stage 0 must be a list of names, got 'model'; write e.g."),
        ("model", "a layout is a list of names for each stage, got 'model'"),
        (3, "a layout is a list of names for each stage, got 3"),
        ([["model", 7]], "stage 0 names 7, which is not a string"),
    ],
)
def test_bad_layouts_are_refused(given, message):
    with pytest.raises(SplitError, match=message):
        by_names(given, UNITS, glue=GLUE)


def test_the_error_holds_the_unit():
    with pytest.raises(SplitError) as caught:
        by_names([["model", "hed"]], UNITS)
    assert caught.value.unit == "hed"


layouts = st.lists(st.lists(st.text(min_size=1), min_size=1).map(tuple), min_size=1).map(tuple)


@given(layouts)
def test_plain_data_reads_back(layout):
    assert from_dict(to_dict(layout)) == layout
    assert from_dict(json.loads(json.dumps(to_dict(layout)))) == layout


names = st.lists(st.from_regex(r"[a-z0-9_]{1,4}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True), min_size=1).map(tuple)


@given(st.lists(names, min_size=1).map(tuple))
def test_yaml_reads_back(layout):
    assert from_yaml(to_yaml(layout)) == layout


def test_yaml_by_hand_keeps_names_that_look_like_numbers():
    assert from_yaml("0: [0, 0.10, 1e3, yes]\n1: [null, 012]") == (("0", "0.10", "1e3", "yes"), ("null", "012"))
    assert from_yaml("- [a, b]\n- [c]") == (("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: [a", "not valid YAML"),
        ("0: [a]\n2: [b]", "stages must be numbered 0 to 1, got 0, 2"),
        ("first: [a]", "a stage must be a number from 0, got 'first'"),
        ("0: a", "stage 0 must be a list of names, got 'a'"),
        ("hello", "a layout is a list of names for each stage, got 'hello'"),
        ("0: [[a]]", "stage 0 names \\['a'\\], which is not a string"),
    ],
)
def test_bad_yaml_is_refused(text, message):
    with pytest.raises(SplitError, match=message):
        from_yaml(text)


def test_a_stage_may_not_appear_twice():
    with pytest.raises(SplitError, match="stage 1 appears twice"):
        from_dict({"1": ["a"], 1: ["b"], 0: ["c"]})


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SplitError, match="pip install pyyaml"):
        to_yaml((("a",),))
