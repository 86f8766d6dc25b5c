import json
import os
import stat

import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.ir.formats import FORMATS
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


def test_json_keeps_what_rows_do_not_tell(tmp_path):
    schedule = ps.Schedule(
        [["0F0"], []], placement=ps.Placement((0, 1), 2), microbatches=4, metadata={"name": "half", "tags": ["a"]}
    )
    schedule.write(tmp_path / "it.json")
    again = ps.read(tmp_path / "it.json")
    assert again == schedule
    assert again.metadata == {"name": "half", "tags": ["a"]}


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"microbatches": 4}, "they do not tell the 4 microbatches; write it as .json"),
        ({"placement": ps.Placement.loop(2, 3)}, "they do not tell the placement; write it as .json"),
    ],
)
def test_rows_refuse_what_they_would_lose(tmp_path, suffix, extra, told):
    with pytest.raises(ps.WriteError, match=told):
        ps.Schedule([["0F0"], ["1F0"]], **extra).write(tmp_path / f"it{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_rows_refuse_a_rank_without_actions(tmp_path):
    with pytest.raises(ps.WriteError, match=r"rank 1 does nothing.*write it as \.json"):
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
    with pytest.raises(ps.WriteError, match="the metadata do not fit into JSON"):
        ps.Schedule([["0F0"]], metadata={"name": object()}).write(tmp_path / "it.json")
    with pytest.raises(ps.WriteError, match="the metadata do not fit into JSON"):
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


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("it.yaml", "the suffix '.yaml' is not one of a schedule; name it *.csv, *.json, *.txt"),
        ("it", "a name without a suffix is not one of a schedule"),
        ("missing/it.csv", "No such file or directory"),
        ("nul\0.csv", "embedded null byte"),
    ],
)
def test_paths_that_do_not_work(tmp_path, name, told):
    with pytest.raises(ps.WriteError) as written:
        ps.build("GPipe", ranks=1, microbatches=1).write(tmp_path / name)
    with pytest.raises(ps.FormatError) as found:
        ps.read(tmp_path / name)
    assert told in str(written.value)
    assert told in str(found.value)
    assert name in str(found.value)


def test_reading_a_folder(tmp_path):
    (tmp_path / "it.csv").mkdir()
    with pytest.raises(ps.FormatError, match="Is a directory"):
        ps.read(tmp_path / "it.csv")
    with pytest.raises(ps.WriteError, match="Is a directory"):
        ps.build("GPipe", ranks=1, microbatches=1).write(tmp_path / "it.csv")
