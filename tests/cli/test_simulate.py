"""``penstock simulate``, ``compare`` and ``view``, as a user runs them."""

import json

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text("forward = 2\nbackward_input = 2\nbackward_weight = 1\nlatency = 0.5\n")
    return str(path)


def test_simulate_draws_to_scale_and_shows_where_the_time_goes():
    assert run("simulate", "1F1B", "-r", "2", "-m", "3", "--width", "44").splitlines() == [
        "       busy peak",
        "rank 0  75%    2 F0F1....B0--F2B1--..B2--",
        "rank 1  75%    1 ..F0B0--F1B1--F2B2--....",
        "time             0   2   4   6   8   10  12",
        "# F forward   B backward   . idle",
        "",
        "rank  busy  idle  communication  peak memory",
        "   0     9     3              0            2",
        "   1     9     3              0            1",
        "makespan 12, of which 25.00% is bubble; span 12, 25.00%; a step takes 12",
        "idle time of all ranks by cause: order 2, drained 2, activation 1, gradient 1",
    ]


def test_simulate_with_costs_as_json(costs):
    report = json.loads(run("simulate", "ZB-H1", "-r", "4", "-m", "8", "--costs", costs, "--json"))
    timeline = ps.simulate(ps.build("ZB-H1", ranks=4, microbatches=8), ps.Costs.read(costs))
    assert report["makespan"] == timeline.makespan
    assert report["idle_by_cause"] == timeline.idle_by_cause
    assert [rank["peak_memory"] for rank in report["ranks"]] == list(timeline.peak_memory)
    assert report["critical_path"][-1]["end"] == timeline.makespan
    assert len(report["idle"]) == len(timeline.waits)


def test_simulate_a_lowered_file_under_a_model(tmp_path, costs):
    path = tmp_path / "mine.csv"
    ps.lower(ps.build("1F1B", ranks=2, microbatches=4), unshard=False).write(path)
    report = json.loads(run("simulate", str(path), "--model", "rendezvous:pair", "-c", costs, "--json"))
    expected = ps.simulate(ps.read(path), ps.Costs.read(costs), model=ps.CommModel("rendezvous", "pair"))
    assert report["makespan"] == expected.makespan


def test_simulate_several_steps_and_chance():
    report = json.loads(run("simulate", "ZBVZeroBubble", "--steps", "3", "--no-synchronise", "--json"))
    assert report["step_time"] == 48
    text = run("simulate", "1F1B", "--noise", "0.1", "--samples", "50")
    assert "makespan with random variation, 50 samples: 5 % within" in text


def test_simulate_writes_pictures(tmp_path):
    names = [tmp_path / name for name in ("a.html", "a.json", "a.svg")]
    text = run("simulate", "1F1B", "-r", "2", "-m", "2", *(part for name in names for part in ("-o", str(name))))
    for name in names:
        assert name.stat().st_size > 500
        assert f"wrote {name}" in text


def test_compare_marks_the_best_and_says_why_others_are_out():
    lines = run("compare", "--ranks", "8", "--microbatches", "24", "--memory-limit", "8").splitlines()
    assert lines[1].split()[:4] == ["*", "InterleavedZeroBubble", "2", "75.5"]
    assert "15 > 8" in next(line for line in lines if "ZB-H2" in line)
    assert len(lines) == 1 + 11
    makespans = [float(line.split()[2 if line[0] != "*" else 3]) for line in lines[1:] if ">" not in line]
    assert makespans == sorted(makespans)


def test_compare_as_json_and_costs_that_do_not_fit_all(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": [1, 1, 1, 3], "latency": [0.5] * 7}))
    report = {row["name"]: row for row in json.loads(run("compare", "-r", "4", "-m", "8", "-c", str(path), "--json"))}
    assert report["ZBVZeroBubble"]["fits"]
    assert report["ZBVZeroBubble"]["hops"] == 6 * 2
    assert report["1F1B"]["reason"].startswith("latency has 7 numbers, but there are 3 edges")
    assert "not 1F1B: latency has 7 numbers" in run("compare", "-r", "4", "-m", "8", "-c", str(path))
    assert "no schedule fits the limit" in run("compare", "--memory-limit", "0.5", code=1)


@pytest.mark.parametrize("width", [44, 60, 80, 120])
def test_compare_leaves_columns_out_rather_than_cutting_numbers(width, tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text("forward = 123456.789\n")
    lines = run("compare", "-c", str(path), "--memory-limit", "4", "--width", str(width)).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert lines[1].startswith("*  ")
    assert ("hops" in lines[0]) is (width >= 100)


def test_a_row_of_the_comparison_can_be_simulated_alone(costs):
    rows = {row["name"]: row for row in json.loads(run("compare", "-c", costs, "--json"))}
    alone = json.loads(run("simulate", "ZBVZeroBubble", "-c", costs, "--per-rank", "--json"))
    assert alone["makespan"] == rows["ZBVZeroBubble"]["makespan"]


def test_what_is_fitted_in_the_comparison_can_be_simulated_alone(tmp_path):
    costs = tmp_path / "costs.toml"
    ps.Costs(forward=1000, backward_input=1000, backward_weight=1000, latency=10).write(costs)
    given = ["-m", "12", "-c", str(costs), "--json"]
    rows = {row["name"]: row for row in json.loads(run("compare", *given))}
    fitted = json.loads(run("simulate", "ZBVZeroBubble", "--per-rank", "--fit", *given))
    assert fitted["name"] == "ZBVZeroBubble, fitted"
    assert fitted["span"] == rows["ZBVZeroBubble, fitted"]["span"] < rows["ZBVZeroBubble"]["span"]
    lowered = json.loads(run("simulate", "ZBVZeroBubble", "--per-rank", "--fit", "--lower", *given))
    assert lowered["span"] == fitted["span"]


def test_view_writes_one_page_of_several(tmp_path):
    page, mine = tmp_path / "both.html", tmp_path / "mine.csv"
    ps.build("ZB-H1", ranks=3, microbatches=6).write(mine)
    assert run("view", "1F1B", "V-Half", str(mine), "-r", "3", "-m", "6", "-o", str(page)) == f"wrote {page}\n"
    text = page.read_text()
    assert "1F1B" in text
    assert "mine.csv" in text
    shared = ps.simulate(ps.build("V-Half", ranks=3, microbatches=6), ps.Costs().of_ranks(ps.Placement.v(3, 6)))
    assert f'"makespan":{shared.makespan}' in text


def test_a_file_has_its_own_order(tmp_path):
    path = tmp_path / "mine.csv"
    ps.build("ZB-H1", ranks=2, microbatches=2).write(path)
    result = CliRunner().invoke(app, ["simulate", str(path), "--fit"])
    assert "mine.csv has its own order; omit --fit" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "1F1B", "--costs", "none.toml"], "none.toml: cannot be read"),
        (["simulate", "1F1B", "--steps", "0"], "steps must be at least 1"),
        (["simulate", "1F1B", "--model", "fast"], "is not a communication model"),
        (["simulate", "1F1B", "--noise", "-1"], "noise must be"),
        (["simulate", "1F1B", "-o", "a.pdf"], "unknown suffix; use"),
        (["view", "none.csv", "-r", "5"], "none.csv has its own sizes"),
        (["simulate", "1F1B", "--steps", "100000000"], "steps must be at most"),
        (["simulate", "1F1B", "--noise", "1", "--samples", "1000000000"], "samples must be at most"),
        (["compare", "--ranks", "0"], "ranks must be at least 1"),
        (["view", "1F1B", "-o", "a.png"], r"a page must be *.html"),
        (["simulate", "none.csv"], "none.csv"),
        (["simulate", "1F1B", "--fit"], "1F1B does not depend on costs"),
    ],
)
def test_bad_usage(arguments, words):
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ps.PenstockError) or result.exit_code == 2
    assert words in str(result.exception) + result.output
