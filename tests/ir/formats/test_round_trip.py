import json
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.edges import Edge
from penstock.ir.formats import FORMATS, files
from penstock.schedules.registry import RECIPES
from strategies import schedules


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize("suffix", FORMATS)
@given(schedule=schedules())
@settings(max_examples=60)
def test_reading_what_was_written(folder, suffix, schedule):
    path = folder / f"schedule{suffix}"
    schedule.write(path)
    assert ps.read(path) == schedule


@pytest.mark.parametrize("suffix", [*FORMATS, ".CSV", ".Json"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_schedule_in_every_format(tmp_path, recipe, suffix):
    schedule = ps.build(recipe.name, ranks=3, microbatches=5)
    schedule.write(str(tmp_path / f"it{suffix}"))
    assert ps.read(str(tmp_path / f"it{suffix}")) == schedule


def test_json_keeps_what_rows_do_not_have(tmp_path):
    schedule = ps.Schedule(
        [["0F0"], []], placement=ps.Placement((0, 1), 2), microbatches=4, metadata={"name": "half", "tags": ["a"]}
    )
    schedule.write(tmp_path / "it.json")
    again = ps.read(tmp_path / "it.json")
    assert again == schedule
    assert again.metadata == {"name": "half", "tags": ["a"]}


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
@pytest.mark.parametrize(
    ("extra", "reported"),
    [
        ({"microbatches": 4}, "which do not determine the 4 microbatches; write a .json file"),
        ({"placement": ps.Placement.loop(2, 3)}, "which do not determine the placement; write a .json file"),
    ],
)
def test_rows_refuse_what_they_would_lose(tmp_path, suffix, extra, reported):
    with pytest.raises(ps.WriteError, match=reported):
        ps.Schedule([["0F0"], ["1F0"]], **extra).write(tmp_path / f"it{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_rows_refuse_a_rank_without_actions(tmp_path):
    with pytest.raises(ps.WriteError, match=r"rank 1 has no actions.*write a \.json file"):
        ps.Schedule([["0F0"], []], placement=ps.Placement((0,), 2)).write(tmp_path / "it.csv")


def test_json_is_a_line_per_rank_with_a_version(tmp_path):
    ps.build("GPipe", ranks=2, microbatches=1).write(tmp_path / "it.json")
    text = (tmp_path / "it.json").read_text()
    assert json.loads(text) == {
        "format": "penstock.schedule",
        "version": 1,
        "metadata": {"name": "GPipe"},
        "microbatches": 1,
        "stages": 2,
        "ranks": [
            {"rank": 0, "stages": [0], "actions": ["0F0", "0B0"]},
            {"rank": 1, "stages": [1], "actions": ["1F0", "1B0"]},
        ],
    }
    assert sum('"rank":' in line for line in text.splitlines()) == 2


def test_metadata_that_json_does_not_know(tmp_path):
    with pytest.raises(ps.WriteError, match="the metadata cannot be represented in JSON"):
        ps.Schedule([["0F0"]], metadata={"name": object()}).write(tmp_path / "it.json")
    with pytest.raises(ps.WriteError, match="the metadata cannot be represented in JSON"):
        ps.Schedule([["0F0"]], metadata={"cost": float("nan")}).write(tmp_path / "it.json")


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "it.csv"
    ps.build("GPipe", ranks=2, microbatches=2).write(path)
    before = path.read_bytes()

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ps.WriteError, match=r"it\.csv: cannot be written: No space left on device"):
        ps.build("1F1B", ranks=4, microbatches=4).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_an_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ps.build("1F1B", ranks=4, microbatches=4).write(tmp_path / "it.csv")
    assert list(tmp_path.iterdir()) == []


def test_permissions_are_those_of_the_old_file_or_the_usual_ones(tmp_path):
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    schedule.write(tmp_path / "new.csv")
    (tmp_path / "plain").touch()
    assert stat.S_IMODE((tmp_path / "new.csv").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    (tmp_path / "new.csv").chmod(0o640)
    schedule.write(tmp_path / "new.csv")
    assert stat.S_IMODE((tmp_path / "new.csv").stat().st_mode) == 0o640


def test_a_link_is_followed_and_a_device_left_alone(tmp_path):
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    (tmp_path / "real.csv").touch()
    (tmp_path / "link.csv").symlink_to("real.csv")
    schedule.write(tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()
    assert ps.read(tmp_path / "real.csv") == schedule
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ps.WriteError, match="is not a regular file"):
        schedule.write(tmp_path / "pipe.csv")


def test_a_long_name_of_wide_letters(tmp_path):
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    schedule.write(tmp_path / f"{'语' * 80}.csv")
    assert ps.read(tmp_path / f"{'语' * 80}.csv") == schedule


@pytest.mark.parametrize("metadata", [{1: "a"}, {1: "a", "1": "b"}, {"sizes": (1, 2)}])
def test_metadata_that_json_would_change(tmp_path, metadata):
    with pytest.raises(ps.WriteError, match="use strings for keys, and lists, not tuples"):
        ps.Schedule([["0F0"]], metadata=metadata).write(tmp_path / "it.json")


def test_what_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_FILE", 100)
    with pytest.raises(ps.WriteError, match="could not be read again"):
        ps.build("GPipe", ranks=4, microbatches=8).write(tmp_path / "it.csv")
    assert list(tmp_path.iterdir()) == []


@given(schedule=schedules(), data=st.data())
@settings(max_examples=60)
def test_json_keeps_everything(folder, schedule, data):
    """Also what the actions do not tell: a placement with more stages, more microbatches, idle ranks, metadata."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    )
    metadata = data.draw(st.dictionaries(st.text(), values, max_size=3))
    idle = data.draw(st.integers(0, 2))
    more = data.draw(st.lists(st.integers(0, schedule.ranks + idle - 1), max_size=3))
    whole = ps.Schedule(
        [*schedule.actions, *[[] for _ in range(idle)]],
        placement=ps.Placement((*schedule.placement.rank_of, *more), schedule.ranks + idle),
        microbatches=data.draw(st.integers(0, 10)),
        metadata=metadata,
    )
    whole.write(folder / "whole.json")
    again = ps.read(folder / "whole.json")
    assert again == whole
    assert again.metadata == metadata


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("it.yaml", "unknown suffix '.yaml'; use *.csv, *.json or *.txt"),
        ("it", "the file name has no suffix"),
        ("missing/it.csv", "No such file or directory"),
        ("nul\0.csv", "embedded null byte"),
    ],
)
def test_paths_that_do_not_work(tmp_path, name, reported):
    with pytest.raises(ps.WriteError) as written:
        ps.build("GPipe", ranks=1, microbatches=1).write(tmp_path / name)
    with pytest.raises(ps.FormatError) as found:
        ps.read(tmp_path / name)
    assert reported in str(written.value)
    assert reported in str(found.value)
    assert name in str(found.value)


def test_reading_a_folder(tmp_path):
    (tmp_path / "it.csv").mkdir()
    with pytest.raises(ps.FormatError, match="Is a directory"):
        ps.read(tmp_path / "it.csv")
    with pytest.raises(ps.WriteError, match="Is a directory"):
        ps.build("GPipe", ranks=1, microbatches=1).write(tmp_path / "it.csv")


SKIPS = (Edge(0, (1, 3), "x"), Edge(0, (2,), "mask", gradient=False), Edge(1, (2,)), Edge(2, (3,)))


@pytest.mark.parametrize("suffix", [".json", ".txt"])
def test_edges_beyond_the_chain(tmp_path, suffix):
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=2).with_edges(SKIPS)
    schedule.write(tmp_path / f"it{suffix}")
    again = ps.read(tmp_path / f"it{suffix}")
    assert again == schedule
    assert not again.is_chain


def test_how_edges_look(tmp_path):
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=1).with_edges(SKIPS)
    schedule.write(tmp_path / "it.txt")
    assert (tmp_path / "it.txt").read_text().startswith("edges: 0>1,3 0>2/F 1>2 2>3\nstep ")
    schedule.write(tmp_path / "it.json")
    assert json.loads((tmp_path / "it.json").read_text())["edges"] == [
        {"source": 0, "targets": [1, 3], "value": "x"},
        {"source": 0, "targets": [2], "value": "mask", "gradient": False},
        {"source": 1, "targets": [2]},
        {"source": 2, "targets": [3]},
    ]
    assert ps.read(tmp_path / "it.json").edges == SKIPS, "with the names of values"


@pytest.mark.parametrize(
    ("edges", "reported"),
    [
        (SKIPS, r"edge 0>1,3 \(x\)"),
        ([Edge(0, (1,)), Edge(1, (2,)), Edge(1, (2,)), Edge(2, (3,))], "two values on one edge"),
        ([Edge(0, (1,)), Edge(2, (3,))], "no edge 1>2"),
    ],
)
def test_csv_holds_chains_only(tmp_path, edges, reported):
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=2).with_edges(edges)
    with pytest.raises(
        ps.WriteError, match=rf"chains only, but the schedule has {reported}; write a \.json or \.txt file"
    ):
        schedule.write(tmp_path / "it.csv")
    assert not (tmp_path / "it.csv").exists()


@pytest.mark.parametrize(
    ("edges", "reported"),
    [
        ("1", '"edges" is "1"; it must be a list'),
        ([1], "1 is not an edge; write e.g."),
        ([{"source": 0}], "is not an edge; write e.g."),
        ([{"source": 0, "targets": [1], "to": 3}], "is not an edge; write e.g."),
        ([{"source": 0, "targets": ["1"]}], "stages must be numbers"),
        ([{"source": 0, "targets": [1], "gradient": 0}], '"gradient" true or false'),
        ([{"source": 1, "targets": [0]}], "goes backwards"),
    ],
)
def test_json_with_bad_edges(tmp_path, edges, reported):
    ps.build("GPipe", ranks=2, microbatches=1).write(tmp_path / "it.json")
    document = json.loads((tmp_path / "it.json").read_text())
    (tmp_path / "it.json").write_text(json.dumps({**document, "edges": edges}))
    with pytest.raises(ps.ReadError) as caught:
        ps.read(tmp_path / "it.json")
    assert reported in str(caught.value)
