"""Layouts in Megatron's notation."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SplitError
from penstock.models.megatron import Groups, group_units, parse, read, render, write


def layers(count):
    return tuple(f"layers.{number}" for number in range(count))


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*2,m|L", ("Ettt", "tt", "tt", "m", "L")),
        ("Et|t|(tt|)*3tL", ("Et", "t", "tt", "tt", "tt", "tL")),
        ("Et|(t|)*3tL", ("Et", "t", "t", "t", "tL")),
        ("E,t*4|t*4|t*4,L", ("Etttt", "tttt", "ttttL")),
        ("E||t|L", ("E", "", "t", "L")),
        ("E|*3t|L", ("E", "", "", "t", "L")),
        ("(Et*2|)*1 t L", ("Ett", "tL")),
        ("E((t|)*2tt|)*2L", ("Et", "t", "tt", "t", "t", "tt", "L")),
        ("t", ("t",)),
        ("", ("",)),
    ],
)
def test_the_notation_is_expanded(text, stages):
    assert parse(text) == stages


def test_the_layout_of_deepseek_v3():
    groups = Groups(("embed",), layers(61), ("mtp.0",), ("norm", "head"))
    layout = read("Et*3|(tt|)*29,m|L", groups)
    assert len(layout) == 32
    assert layout[0] == ("embed", "layers.0", "layers.1", "layers.2")
    assert layout[1] == ("layers.3", "layers.4")
    assert layout[29:] == (("layers.59", "layers.60"), ("mtp.0",), ("norm", "head"))
    assert write(layout, groups) == "Et*3|(tt|)*29,m|L"


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (["Ett", "ttt", "ttL"], "Ett|t*3|ttL"),
        (["E", "", "t", "L"], "E||t|L"),
        (["Et", *["t", "tt"] * 4, "L"], "Et|(t|tt|)*4,L"),
        (["E", "t", "t", "L"], "E|t|t|L"),
        (["E", *["t"] * 5, "L"], "E|(t|)*5,L"),
        (["Etttm", "L"], "Et*3,m|L"),
        ([*["ttt"] * 4, *["t"] * 6, "L"], "(t*3|)*4(t|)*6,L"),
        ([*["tt"] * 4, ""], "(tt|)*4"),
    ],
)
def test_layouts_are_written_compactly(stages, text):
    assert render(stages) == text
    assert parse(text) == tuple(stages)


@given(st.lists(st.text("EtmL", max_size=6) | st.sampled_from(["tt", "t", "ttt"]), min_size=1, max_size=25))
def test_what_is_written_reads_back_the_same(stages):
    text = render(stages)
    assert parse(text) == tuple(stages)
    assert len(text.replace(",", "")) <= len("|".join(stages))


def megatron_parse(text):
    """Expand the notation as Megatron documents it: no nested groups, innermost repetitions by substitution."""
    text = text.replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    assert not set(text) - set("EtmL|")
    return tuple(text.split("|"))


@given(st.lists(st.sampled_from(["tt", "t", "ttt", "Ettt", "m", "", "mL", "L"]), min_size=1, max_size=40))
def test_what_is_written_never_nests_groups(stages):
    assert megatron_parse(render(stages)) == tuple(stages)


@given(st.integers(1, 40), st.integers(0, 3), st.data())
def test_every_layout_in_call_order_can_be_written(count, predictors, data):
    groups = Groups(
        ("embed", "positions"), layers(count), tuple(f"mtp.{n}" for n in range(predictors)), ("norm", "head")
    )
    blocks = [groups.before, *[(unit,) for unit in groups.layers + groups.predictors], groups.after]
    stages = data.draw(st.integers(1, len(blocks)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(blocks) - 1), min_size=stages - 1, max_size=stages - 1)))
    layout = tuple(
        tuple(unit for block in blocks[start:end] for unit in block)
        for start, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True)
    )
    assert read(write(layout, groups), groups) == layout


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("Et*3|x|L", "'x' is not a symbol; use E, t, m, L", 5),
        ("Et*|L", r"\* needs a number from 1 behind it", 3),
        ("Et*0|L", r"\* needs a number from 1 behind it", 3),
        ("E(tt|L", "this parenthesis is not closed", 1),
        ("Ett|)*3L", "this parenthesis was never opened", 4),
        ("E(tt|)L", r"a group needs \*n behind it", 6),
        ("E()*3L", "this group is empty", 1),
        ("*3", r"'\*' is not a symbol", 0),
        ("t*3*2", r"'\*' is not a symbol", 3),
        ("t3", "'3' is not a symbol", 1),
        ("t*9999999", "this stands for more than 1000000 symbols", 0),
        ("t*99999999", r"\* needs a number", 2),
        ("T", "'T' is not a symbol", 0),
        ("(" * 30, "groups are nested too deeply", 21),
    ],
)
def test_mistakes_are_shown_at_their_position(text, message, position):
    with pytest.raises(SplitError, match=message) as caught:
        parse(text)
    *_, shown, mark = str(caught.value).splitlines()
    assert shown == f"  {text}"
    assert mark.index("^") - 2 == position


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et*3|t|L", r"has 4 t \(layer\), but the model has 3: layers.0, layers.1, layers.2"),
        ("Et|t|L", r"has 2 t \(layer\), but the model has 3"),
        ("Et|ttm|L", r"has 1 m \(multi-token-prediction layer\), but the model has 0$"),
        ("t|tt|L", r"needs E \(embedding\) exactly once, for embed"),
        ("Et|ttLL", r"needs L \(loss\) exactly once, for norm, head"),
        ("Ett|t", r"needs L \(loss\) exactly once"),
        ("tE|tt|L", "is out of order: E comes first"),
        ("E||ttt|L", "stage 1 of 'E||ttt|L' is empty; Megatron allows that, but here every stage needs a unit$"),
    ],
)
def test_a_layout_must_fit_the_model(text, message):
    with pytest.raises(SplitError, match=message.replace("||", r"\|\|").replace("t|L'", r"t\|L'")):
        read(text, Groups(("embed",), layers(3), (), ("norm", "head")))


def test_models_without_embedding_or_head():
    groups = Groups((), layers(3), (), ())
    assert read("Et|tt L", groups) == (("layers.0",), ("layers.1", "layers.2"))
    assert write((("layers.0",), ("layers.1", "layers.2")), groups) == "t|tt"
    with pytest.raises(SplitError, match=r"stage 0 of .* is empty; .*: the model has nothing for E"):
        read("E|ttt", groups)


def test_a_layout_that_does_not_fit_the_notation_is_not_written():
    groups = Groups(("embed", "positions"), layers(3), (), ("norm", "head"))
    apart = (("embed", "layers.0"), ("positions", "layers.1", "layers.2", "norm", "head"))
    turned = (("embed", "positions", "layers.1"), ("layers.0", "layers.2", "norm", "head"))
    for layout in (apart, turned):
        with pytest.raises(
            SplitError, match=r"does not fit Megatron's notation.*write the names of each stage instead"
        ):
            write(layout, groups)
    with pytest.raises(SplitError, match="leaves out"):
        write((("embed", "layers.0"),), groups)


def test_units_are_sorted_into_groups():
    units = ["wte", "wpe", "h.0", "h.1", "h.2", "ln_f", "lm_head"]
    assert group_units(units) == Groups(("wte", "wpe"), ("h.0", "h.1", "h.2"), (), ("ln_f", "lm_head"))
    extra = [*units[:5], "extra.0", *units[5:]]
    assert group_units(extra, predictors=["extra.0"]).predictors == ("extra.0",)
    assert group_units(["a", "b"]).layers == ("a", "b")


def test_units_between_the_layers_have_no_symbol():
    with pytest.raises(SplitError, match="h_norm between the layers has no symbol"):
        group_units(["wte", "h.0", "h_norm", "h.1", "head"])
    with pytest.raises(SplitError, match="no units"):
        group_units([])
