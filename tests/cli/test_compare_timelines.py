"""``penstock compare predicted.json measured.json``, and what else takes timeline files."""

import json

import pytest

import penstock as ps
from cli.commands import penstock
from penstock.simulation.timeline_json import read_timeline, write_timeline


@pytest.fixture
def files(tmp_path):
    """A prediction, and one with a slower stage in the place of a measurement."""
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    paths = []
    for name, forward in (("predicted", 1), ("measured", [1, 3])):
        paths.append(tmp_path / f"{name}.json")
        write_timeline(ps.simulate(schedule, ps.Costs(forward=forward)), paths[-1])
    return list(map(str, paths))


def test_a_table_of_what_differs(files):
    result = penstock("compare", *files, "--width", "100")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["makespan", "12", "18", "+50.0%"] in lines
    assert ["rank", "1", "busy", "9", "15", "+66.7%"] in lines
    assert ["1F0", "1", "1", "3", "2", "2"] in lines


def test_json_a_page_and_costs(files, tmp_path):
    page, costs = tmp_path / "both.html", tmp_path / "costs.toml"
    result = penstock("compare", *files, "--json", "--html", str(page), "--save-costs", str(costs))
    facts = json.loads(result.stdout)
    assert facts["makespan"] == {"predicted": 12, "measured": 18, "difference": 0.5}
    assert facts["ranks"][1]["busy"]["measured"] == 15
    assert facts["actions"][0]["measured"] - facts["actions"][0]["predicted"] == 2
    assert facts["wrote"] == [str(page), str(costs)]
    assert '"title":"predicted.json"' in page.read_text()
    assert ps.Costs.read(costs).forward == (1, 3)


def test_a_prediction_is_kept_and_drawn(files, tmp_path):
    kept, page = tmp_path / "kept.json", tmp_path / "page.html"
    result = penstock("simulate", "1F1B", "-r", "2", "-m", "3", "--timeline", str(kept))
    assert result.returncode == 0
    assert f"wrote {kept}" in result.stdout
    assert read_timeline(kept).makespan == read_timeline(files[0]).makespan
    result = penstock("view", str(kept), files[1], "GPipe", "-r", "2", "-o", str(page))
    assert (result.returncode, result.stderr) == (0, "")
    text = page.read_text()
    assert all(f'"title":"{title}"' in text for title in ("kept.json", "measured.json", "GPipe"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}"], "expected two timelines, got 1"),
        (["{0}", "missing.json"], "missing.json does not exist"),
        (
            ["{0}", "{folder}/schedule.json"],
            "schedule.json is not a timeline; write one with penstock simulate or plan",
        ),
        (["{0}", "{folder}"], "holds no trace of all ranks of a pipeline"),
        (["--html", "page.html"], "is for two timelines"),
    ],
)
def test_what_cannot_be_compared(files, tmp_path, arguments, message):
    ps.build("GPipe", ranks=2, microbatches=2).write(tmp_path / "schedule.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    result = penstock(
        "compare", *(each.format(*files, folder=tmp_path if "/" in each else empty) for each in arguments)
    )
    assert result.returncode == 2
    assert message in result.stderr
