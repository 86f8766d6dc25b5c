"""``penstock plan``, as a user runs it."""

import json
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import penstock as ps
from cli.commands import penstock
from penstock.cli.app import app
from penstock.errors import PlanError
from penstock.simulation.timeline_json import read_timeline

QUICK = ("--effort", "0.02")


def facts(*arguments, cwd):
    done = penstock("plan", *QUICK, "--json", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_chosen_schedule_is_marked_explained_and_written(tmp_path):
    sizes = ("--ranks", "4", "--microbatches", "8", "--memory-limit", "4", "--width", "120")
    done = penstock("plan", *sizes, *QUICK, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0].split() == ["schedule", "where", "time", "bubble", "memory", "why", "not"]
    assert lines[1].split()[0] == "*"
    assert sum(line.startswith("*") for line in lines) == 1
    (chosen,) = (line for line in lines if line.startswith("chosen: "))
    time_of_plan = float(chosen.rsplit(" ", 1)[1])
    schedule = ps.read(tmp_path / "plan.csv")
    assert ps.simulate(schedule, ps.Costs().of_ranks(schedule.placement)).makespan == time_of_plan == 24.75
    assert any(line.startswith("proved optimal among the placements tried: ") for line in lines)
    assert "rank 0 holds 4, 100% of its limit" in lines
    assert lines[-2:] == ["wrote plan.csv", "wrote plan.html"]
    assert "<html" in (tmp_path / "plan.html").read_text()[:200]
    (hidden,) = (int(found[1]) for line in lines if (found := re.fullmatch(r"and (\d+) more: --all shows them", line)))
    everything = penstock("plan", *sizes, *QUICK, "--all", cwd=tmp_path).stdout.splitlines()
    assert len(everything) == len(lines) + hidden - 1


def test_json_has_the_plan_and_files_are_as_asked(tmp_path):
    names = ("a.txt", "a.svg", "a.html")
    given = ("-r", "3", "-m", "6", "-s", "1", "--objective", "span", "--memory-limit", "5")
    report = facts(*given, *(part for name in names for part in ("-o", name)), cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    timeline = ps.simulate(ps.read(tmp_path / "a.txt"))
    assert report["objective"] == "span"
    assert report["value"] == timeline.span == report["alternatives"][0]["value"]
    assert report["lower_bound"] <= report["value"]
    assert report["memory_limit"] == [5, 5, 5]
    assert max(timeline.peak_memory) <= 5
    assert report["partition"] is None
    assert [each["reason"] for each in report["alternatives"]].count(None) == 1


def test_the_seed_decides(tmp_path):
    given = ("-r", "3", "-m", "7", "-s", "2", "--memory-limit", "2.5", "--seed", "3")
    first, second = (facts(*given, "-o", f"{number}.csv", cwd=tmp_path) for number in range(2))
    assert first == second
    assert (tmp_path / "0.csv").read_bytes() == (tmp_path / "1.csv").read_bytes()


def test_memory_has_units_and_costs_come_from_a_file(tmp_path):
    (tmp_path / "costs.toml").write_text(f"activation = {4 * 2**30}\nforward = [1, 2, 1]\n")
    given = ("-r", "3", "-m", "6", "-c", "costs.toml", "-s", "1")
    report = facts(*given, "--memory-limit", "8GiB", cwd=tmp_path)
    assert report["memory_limit"] == [8 * 2.0**30] * 3
    assert max(report["alternatives"][0]["peak_memory"]) == 8 * 2.0**30
    done = penstock("plan", *given, "--memory-limit", "3GiB", *QUICK, cwd=tmp_path)
    assert done.returncode == 1
    assert "nothing fits memory_limit=" in done.stderr
    assert "a limit of 4.29497e+09 for every rank is enough" in done.stderr
    assert not (tmp_path / "plan.txt").exists()


def test_layers_are_cut_and_the_partition_is_printed(tmp_path):
    (tmp_path / "costs.toml").write_text("forward = [1, 1, 1, 1, 1, 1, 1, 3]\nactivation = 1\n")
    given = ("-r", "2", "-m", "6", "-s", "1", "--layers", "--no-split", "-c", "costs.toml")
    report = facts(*given, cwd=tmp_path)
    assert sum(report["partition"]) == 8
    assert report["partition"][0] > report["partition"][1]
    assert not any("I" in str(action) for action in ps.read(tmp_path / "plan.csv").actions[0])
    text = penstock("plan", *given, *QUICK, "--timeline", "predicted.json", cwd=tmp_path).stdout
    assert read_timeline(tmp_path / "predicted.json").makespan == report["value"]
    assert f"layers per stage: {', '.join(map(str, report['partition']))}" in text


def test_recomputation_and_random_times_can_be_asked_for(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"recompute_activation": 0.1}))
    given = ("-r", "2", "-m", "4", "-s", "1", "-c", "costs.json")
    assert any(facts(*given, "--memory-limit", "0.5", "--recompute", cwd=tmp_path)["recompute"])
    late = facts(*given, "--noise", "0.1", "--stragglers", "0.05", "--percentile", "95", cwd=tmp_path)
    assert late["objective"] == "95th percentile of the makespan"
    assert late["gap"] is None


def test_a_sweep_over_memory_falls_and_is_drawn(tmp_path):
    given = ("-r", "3", "-m", "6", "-s", "1", "--sweep", "memory", "-o", "front.svg", "-o", "front.png")
    points = facts(*given, cwd=tmp_path)
    assert len(points) == 8
    times = [point["plan"]["value"] for point in points]
    assert times == sorted(times, reverse=True)
    assert [point["is_better"] for point in points] == [
        all(value < before * (1 - 1e-9) for before in times[:number]) for number, value in enumerate(times)
    ]
    svg = (tmp_path / "front.svg").read_text()
    assert "memory limit" in svg
    assert "time per microbatch" in svg
    assert (tmp_path / "front.png").read_bytes()[:4] == b"\x89PNG"


def test_a_sweep_prints_a_row_for_each_value_and_writes_nothing_by_default(tmp_path):
    done = penstock("plan", "-r", "2", "-m", "4", "-s", "1", "--sweep", "microbatches", *QUICK, cwd=tmp_path)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows[1:]] == ["1", "2", "4", "8", "16"]
    assert not list(tmp_path.iterdir())


def test_settings_of_frameworks_are_written_beside_the_plan(tmp_path):
    given = ("-r", "2", "-m", "4", "-s", "1", "-o", "out/plan.csv", "--for", "torchtitan", "--for", "megatron")
    (tmp_path / "out").mkdir()
    done = penstock("plan", *given, *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/torchtitan/schedule.csv").read_text() == (tmp_path / "out/plan.csv").read_text()
    assert "pipeline_parallel_degree = 2" in (tmp_path / "out/torchtitan/torchtitan.toml").read_text()
    assert (tmp_path / "out/megatron/megatron.args").read_text() in done.stdout
    assert "note: Megatron-LM reads no custom schedule; the nearest schedule is 1F1B" in done.stdout
    assert "wrote out/megatron/megatron.args" in done.stdout
    report = facts(*given, cwd=tmp_path)
    assert [each["framework"] for each in report["settings"]] == ["torchtitan", "megatron"]
    assert report["settings"][0]["makespan"] == report["value"]
    assert report["settings"][1]["schedule"] == "1F1B"


def test_settings_say_what_recomputes():
    plan = ps.plan(
        ps.Costs(recompute_activation=0.1), ranks=2, microbatches=4, memory_limit=0.5, recompute=True, effort=0.02
    )
    stages = ", ".join(str(stage) for stage, again in enumerate(plan.recompute) if again)
    assert f"stages that recompute their forward: {stages};" in plan.settings("torch").notes[-1]
    layers = ps.plan(ps.Costs(forward=[1] * 6), layers=True, ranks=2, microbatches=4, stages_per_rank=1, effort=0.02)
    names = layers.partition.group([f"layers.{number}" for number in range(6)])
    assert layers.settings("megatron", names=names).text.splitlines()[-1].endswith('"Et*3|t*3,L"')
    with pytest.raises(PlanError, match="'torchtitan'"):
        layers.settings("torchtitn")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--for", "megatorn"], "unknown framework 'megatorn'; did you mean 'megatron'?"),
        (["--for", "jax"], "the frameworks are torch, torchtitan, automodel, megatron, primus"),
        (["--for", "torch", "--sweep", "memory"], "--sweep makes several; omit one of them"),
        (["--memory-limit", "8 apples"], "--memory-limit '8 apples' is not an amount"),
        (["--memory-limit", "1.2.3"], "is not an amount"),
        (["--objective", "speed"], "unknown objective 'speed'"),
        (["--effort", "0"], "effort must be above 0"),
        (["--exact", "0"], "exact must be a number of seconds"),
        (["--ranks", "0"], "ranks must be at least 1"),
        (["--sweep", "colour"], "cannot sweep 'colour'; choose one of memory, microbatches, ranks"),
        (["--costs", "none.toml"], "none.toml"),
        (["--percentile", "90"], "without noise"),
        (["--ranks", "many"], "valid integer"),
    ],
)
def test_bad_usage_ends_with_2_before_anything_is_written(arguments, words, tmp_path):
    done = penstock("plan", *QUICK, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_costs_that_do_not_fit_name_their_file(tmp_path):
    (tmp_path / "costs.toml").write_text("forward = [1, 2]\n")
    done = penstock("plan", "-r", "3", "-c", "costs.toml", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert "costs.toml: " in done.stderr


def test_help_has_examples():
    text = CliRunner().invoke(app, ["plan", "--help"]).output
    assert "Example: penstock plan --ranks 8 --microbatches 24" in text
    assert "--for" in text


ANNOUNCED = """
import sys
from penstock.cli.main import main
from penstock.planning.planner import Planner
search = Planner.search
def announce_and_search(planner):
    print("searching", file=sys.stderr, flush=True)
    search(planner)
Planner.search = announce_and_search
main()
"""


@pytest.mark.processes
def test_an_interruption_keeps_the_best_so_far(tmp_path):
    """Interrupt a search that would take hours."""
    costs = tmp_path / "costs.toml"
    costs.write_text("forward = [1, 1.3, 1, 1.1]\n")
    given = ["-r", "4", "-m", "30", "--memory-limit", "3", "-c", str(costs), "--effort", "10000", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCED, "plan", *given, "-o", "kept.csv"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr.readline() == "searching\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    report = json.loads(out)
    kept = ps.read(tmp_path / "kept.csv")
    ps.verify(kept)
    costs_of_stages = ps.Costs.read(costs).of_ranks(kept.placement)
    assert ps.simulate(kept, costs_of_stages).makespan == pytest.approx(report["value"])
    assert report["gap"] > 0
