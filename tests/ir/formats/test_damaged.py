"""A damaged file is one clear error of ours that says where, and never a half-read schedule."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.formats import FORMATS, files
from penstock.schedules.registry import RECIPES


def failing(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ps.ReadError) as caught:
        ps.read(path)
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300
    return caught.value


@pytest.mark.parametrize(
    ("content", "row", "cell", "reported"),
    [
        ("0F0,0B0\n1F0,2F0garbage\n", 2, 2, "'2F0garbage' is not an action; write e.g. '2F0'"),
        ("0F0,0B0\n1F0,-1F0\n", 2, 2, "'-1F0' is not an action"),
        ("0F0,F0\n", 1, 2, "'F0' is not an action"),
        ("0F0,2Q1\n", 1, 2, "'2Q1' is not an action"),
        ("(1F0,0B0\n", 1, 1, "'(1F0' is not an action; write e.g. '(2F5;7B3)OVERLAP_F_B'"),
        ("0F0;0B0\n", 1, 1, "'0F0;0B0' is not an action"),
        ("0F0,0B0\n1F0,1", 2, 2, "'1' is not an action"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1",
            2,
            None,
            "seems to be truncated: its last row has no line break, and stage 1 has 1 back",
        ),
        ("0F0,0F1\n1F0", 2, None, "stage 1 has 1 forwards while stage 0 has 2"),
        ("0F0,0F1\n1F0,1F0", 2, None, "and a stage has the forward of a microbatch twice"),
        ("0F0,0I0,0W0\n1F0,1I0", 2, None, "stage 1 has 0 weight gradients while stage 0 has 1"),
        ('0F0,"0B0\n1F0,1B0\n', 2, None, "is not CSV: unexpected end of data"),
        ('0F0,"0B0"x\n1F0,1B0\n', 1, None, "is not CSV: "),
        ("0F0\n\n1F0\n", 2, None, "blank row"),
        ("", None, None, "is empty"),
        ("\n\n", None, None, "is empty"),
        ("0F0,0B0\n0F0,0B0\n", 2, 1, "stage 0 is on rank 0 (step 0) and rank 1 (step 0)"),
        (",,\n", 1, 1, "rank 0 has no actions"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0", 2, None, "may be truncated: its last row has no line break; if it is complete"),
        (b"\x80\x81\xff", 1, None, "is not text: byte 0 is not UTF-8"),
        (b"0F0\n\xff", 2, None, "is not text: byte 4 is not UTF-8"),
        (b"0F0,\x00\n", 1, None, "is not text: it contains a NUL character"),
        ("0F0," + "9" * 200_000 + "F0\n", 1, None, "field larger than field limit"),
    ],
)
def test_csv(tmp_path, content, row, cell, reported):
    error = failing(tmp_path, "it.csv", content)
    assert (error.row, error.cell) == (row, cell)
    assert reported in str(error)


def test_a_whole_last_row_needs_no_line_break(tmp_path):
    (tmp_path / "it.csv").write_text("0F0,,,0B0\n,1F0,1I0,1W0")
    assert ps.read(tmp_path / "it.csv") == ps.Schedule([["0F0", None, None, "0B0"], [None, "1F0", "1I0", "1W0"]])


@pytest.mark.parametrize("content", [b"0F0,0B0\r\n1F0,1B0\r\n", b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n\r\n"])
def test_byte_order_marks_and_line_ends_are_fine(tmp_path, content):
    (tmp_path / "it.csv").write_bytes(content)
    assert ps.read(tmp_path / "it.csv") == ps.Schedule([["0F0", "0B0"], ["1F0", "1B0"]])


def test_spaces_and_quotes_around_cells_are_fine(tmp_path):
    (tmp_path / "it.csv").write_text(' 0F0 ,"0B0",\n"1F0", 1B0\t,  \n')
    assert ps.read(tmp_path / "it.csv") == ps.Schedule([["0F0", "0B0", None], ["1F0", "1B0", None]])


@pytest.mark.parametrize(("name", "piece"), [("it.csv", b"0F0,"), ("it.json", b"["), ("it.txt", b"0F0 ")])
def test_a_line_of_200_megabytes(tmp_path, name, piece):
    error = failing(tmp_path, name, piece * (200 * 2**20 // len(piece)))
    assert "is larger than 64 MiB" in str(error)


@pytest.mark.parametrize("name", ["it.csv", "it.json", "it.txt"])
def test_a_line_of_40_megabytes_that_fits_the_file_limit(tmp_path, name):
    failing(tmp_path, name, b"a" * (40 * 2**20))


def document(**changes):
    whole = {
        "format": "penstock.schedule",
        "version": 1,
        "metadata": {},
        "microbatches": 1,
        "stages": 2,
        "ranks": [
            {"rank": 0, "stages": [0], "actions": ["0F0", None]},
            {"rank": 1, "stages": [1], "actions": [None, "1F0"]},
        ],
    }
    return json.dumps({key: value for key, value in {**whole, **changes}.items() if value != "drop"})


def ranks(*entries):
    return {"ranks": list(entries)}


GOOD = {"rank": 0, "stages": [0], "actions": ["0F0"]}


@pytest.mark.parametrize(
    ("content", "row", "cell", "reported"),
    [
        (document()[:-30], 1, None, "is not JSON: "),
        ("", None, None, "is empty"),
        ("\n", None, None, "is empty"),
        ('{"format', 1, None, "is not JSON: Unterminated string starting at column 2"),
        ("[1, 2]", None, None, "expected an object, got [1, 2]"),
        ("3" * 5000, None, None, "is not a schedule: "),
        ("[" * 100_000, None, None, "nested too deeply"),
        ("[" * 900 + "]" * 900, None, None, "expected an object"),
        (document(stages=True), None, None, '"stages" is true, but the ranks hold 2'),
        ('{"a": NaN}', None, None, "NaN is not valid JSON"),
        ('{"rank": 0, "rank": 0}', None, None, 'duplicate key "rank"'),
        ("{}", None, None, '"format": "penstock.schedule" is missing'),
        (document(format="other"), None, None, "not a schedule"),
        (document(version=2), None, None, "has format version 2; this penstock reads up to version 1. Upgrade"),
        (document(version="1"), None, None, '"version" is "1"'),
        (document(version=True), None, None, '"version" is true'),
        (document(version=0), None, None, '"version" is 0'),
        (document(metadata=[]), None, None, '"metadata" is []; it must be an object'),
        (document(microbatches="drop"), None, None, '"microbatches" is null or missing'),
        (document(microbatches=-1), None, None, '"microbatches" is -1'),
        (document(microbatches=10**30), None, None, "microbatches must be at most 268435456"),
        (document(ranks=[]), None, None, '"ranks" is []; it must be a list'),
        (document(ranks=[3, 4]), 1, None, "expected an object with rank, stages and actions, got 3"),
        (document(ranks=[GOOD, GOOD]), 2, None, "duplicate rank 0"),
        (document(ranks=[GOOD, {**GOOD, "rank": 2}]), 2, None, '"rank" is 2; the ranks are 0 to 1'),
        (document(ranks=[{**GOOD, "stages": "0"}]), 1, None, '"stages" is "0"'),
        (document(ranks=[{**GOOD, "actions": "0F0"}]), 1, None, '"actions" is "0F0"'),
        (document(ranks=[{**GOOD, "actions": ["0F0", 3]}]), 1, 2, '3 is not an action; write e.g. "2F0", or null'),
        (document(ranks=[{**GOOD, "actions": ["0F0", ""]}]), 1, 2, '"" is not an action'),
        (document(ranks=[{**GOOD, "actions": ["2Q1"]}]), 1, 1, "'2Q1' is not an action"),
        (document(stages=3), None, None, '"stages" is 3, but the ranks hold 2'),
        (document(ranks=[GOOD, {**GOOD, "rank": 1}]), None, None, "stage 0 is on rank 0 and on rank 1"),
        (document(ranks=[{**GOOD, "stages": [5]}]), None, None, "no rank holds stage 0"),
        (b"\xff" + document().encode(), 1, None, "is not UTF-8"),
    ],
)
def test_json(tmp_path, content, row, cell, reported):
    error = failing(tmp_path, "it.json", content)
    assert (error.row, error.cell) == (row, cell)
    assert reported in str(error)


def test_text(tmp_path):
    error = failing(tmp_path, "it.txt", "rank 0: 0F0\nrank 1: 1F0 2Q1\n")
    assert (error.row, error.cell) == (2, 2)


@pytest.mark.parametrize("suffix", FORMATS)
@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_is_our_error_or_a_schedule(tmp_path_factory, suffix, data):
    """Bytes of good files changed, cut, repeated: what comes out is a schedule or a ReadError, nothing else."""
    recipe = data.draw(st.sampled_from(RECIPES))
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    ps.build(recipe.name, ranks=data.draw(st.integers(1, 3)), microbatches=2).write(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 20)))
        content[start:end] = data.draw(
            st.sampled_from([b"", bytes(content[:start]), b"\0", b'"', b"\r\n", b"\xff", b"9" * 20, b",", b"{"])
            | st.binary(max_size=5)
        )
    path.write_bytes(content)
    assert_our_error_or_a_schedule(path)


def assert_our_error_or_a_schedule(path):
    try:
        result = ps.read(path)
    except ps.ReadError as error:
        result = error
    assert isinstance(result, ps.Schedule) or result.path == str(path)


@pytest.mark.parametrize("suffix", FORMATS)
@given(content=st.binary(max_size=200))
@settings(max_examples=100)
def test_junk(tmp_path_factory, suffix, content):
    path = tmp_path_factory.getbasetemp() / f"junk{suffix}"
    path.write_bytes(content)
    assert_our_error_or_a_schedule(path)


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("name", [recipe.name for recipe in RECIPES])
def test_a_file_cut_anywhere_inside_its_last_row_is_noticed(tmp_path, name, lowered, suffix):
    """A cut at a line end cannot be told from a smaller schedule; anywhere else it must not pass as the whole."""
    path = tmp_path / f"it{suffix}"
    schedule = ps.build(name, ranks=2, microbatches=12)
    schedule = ps.lower(schedule) if lowered else schedule
    schedule.write(path)
    whole = path.read_bytes()
    last_row = whole.rstrip().rindex(b"\n") + 1
    accepted = 0
    for end in reversed(range(last_row + 1, len(whole))):
        os.truncate(path, end)
        try:
            cut = ps.read(path)
        except ps.ReadError:
            continue
        assert cut == schedule, (end, whole[end - 10 : end])
        accepted += 1
    assert accepted <= 2, "only what misses nothing but its line end"


def test_the_limit_is_checked_before_anything_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_FILE", 10)
    assert "is larger than" in str(failing(tmp_path, "it.csv", b"0F0,\xff" * 3))
