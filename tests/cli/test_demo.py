import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import penstock as ps
from cli.commands import penstock
from penstock.cli.demo import command, results
from penstock.cli.demo.choose import choose_schedule
from penstock.cli.demo.listener import Listener
from penstock.runtime.demo.examine import differences
from penstock.runtime.demo.held_memory import HeldMemory

PENSTOCK = str(Path(sys.executable).parent / "penstock")
LIMIT = 240
"""Seconds: on a quiet machine a run takes ten."""


def launched(folder, *arguments):
    plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    command = [PENSTOCK, "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT, env=plain, cwd=folder)


def gone(processes):
    """Whether these have ended, after a moment."""
    end = time.monotonic() + 20
    while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < end:
        time.sleep(0.1)
    return not [process for process in processes if Path(f"/proc/{process}").exists()]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A run of the demo as it is, with fewer steps."""
    folder = tmp_path_factory.mktemp("planned")
    return folder, launched(folder, "--steps", "20", "--microbatches", "4")


def children(process):
    """The processes that it has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{process}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


@pytest.mark.processes
def test_it_plans_proves_and_learns(planned):
    _, result = planned
    assert (result.returncode, result.stderr) == (0, "")
    assert "profiling the 10 layers on 4 ranks" in result.stdout
    assert "planned for the measured costs" in result.stdout
    assert re.search(r"lowered to \d+ actions: complete, ordered, free of deadlock \(under 12 of 12", result.stdout)
    assert "gradients of the first step match the unsplit model" in result.stdout
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\d\.\d{3})$", result.stdout, re.M)
    }
    assert list(losses) == [1, *range(2, 21, 2)]
    assert losses[1] > 5
    assert losses[20] < 4
    table = result.stdout.partition("busy")[2]
    assert re.findall(r"^ +(\d)(?: +[\d.]+ ms){4}(?: +[\d.]+ MiB){2}$", table, re.M) == ["0", "1", "2", "3"]
    assert re.search(r"a step: predicted [\d.]+ ms, measured [\d.]+ ms", table)
    assert result.stdout.endswith("report: penstock-demo/report.html\n")


@pytest.mark.processes
def test_the_report_is_complete(planned, browser):
    folder, _ = planned
    page = browser.new_page()
    errors = []
    page.on("console", lambda message: errors.append(message.text))
    page.goto((folder / "penstock-demo" / "report.html").as_uri())
    assert page.locator("h2").all_inner_texts() == [
        "Training",
        "A step: predicted and measured",
        "Time and memory of each rank",
        "The plan",
        "Stages",
    ]
    assert "loss by step" in page.locator("svg").get_attribute("aria-label")
    figures = page.frame_locator("iframe").locator("#figures")
    figures.locator("tr").first.wait_for()
    assert "predicted" in figures.inner_text()
    assert "measured" in figures.inner_text()
    rows = page.locator("section").nth(2).locator("tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert page.locator("tr.marked").inner_text().endswith("chosen")
    assert errors == []
    page.close()


@pytest.mark.processes
def test_it_resumes_on_another_number_of_ranks(planned):
    folder, _ = planned
    arguments = ("--json", "--resume", "--ranks", "2", "--schedule", "1f1b", "--steps", "23", "--microbatches", "4")
    result = launched(folder, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert {name: facts[name] for name in ("schedule", "ranks", "stages", "microbatches", "findings")} == {
        "schedule": "1F1B",
        "ranks": 2,
        "stages": 2,
        "microbatches": 4,
        "findings": [],
    }
    assert facts["actions_when_lowered"] == sum(map(len, ps.lower(ps.build("1F1B", ranks=2, microbatches=4)).actions))
    assert sum(facts["layers"]) == 10
    assert len(facts["losses"]) == 23
    assert max(facts["losses"][20:]) < 4
    assert facts["gradients"] is None  # they are compared in the first step
    assert facts["tokens_per_second"] > 0
    for figures in (facts["predicted"], facts["measured"]):
        assert len(figures["ranks"]) == 2
        assert all(rank["busy"] > 0 and rank["memory"] > 0 for rank in figures["ranks"])
        assert all(rank["busy"] + rank["idle"] == pytest.approx(figures["makespan"]) for rank in figures["ranks"])
    for predicted, measured in zip(facts["predicted"]["ranks"], facts["measured"]["ranks"], strict=True):
        assert measured["memory"] == pytest.approx(predicted["memory"], rel=0.1)


@pytest.mark.processes
def test_in_a_terminal(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        for name in ("NO_COLOR", "CI"):
            os.environ.pop(name, None)
        os.chdir(tmp_path)
        os.execv(PENSTOCK, [PENSTOCK, "demo", "-r", "1", "--schedule", "gpipe", "--steps", "4", "-m", "1"])
    written, end = b"", time.monotonic() + LIMIT
    with suppress(OSError):  # a terminal that is closed answers with an error
        while time.monotonic() < end and select.select([terminal], [], [], LIMIT)[0]:
            if not (piece := os.read(terminal, 65536)):
                break
            written += piece
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())
    for number in range(1, 5):
        assert re.search(rf"training .*{number}/4 loss \d\.\d{{3}}  [\d,]+ tokens/s  bubble \d+%", shown)
    assert "step 1 loss" not in shown


@pytest.mark.processes
def test_an_interrupt_saves_what_can_be_resumed(tmp_path):
    sizes = ("--ranks", "2", "--schedule", "1F1B", "-m", "2")
    command = [PENSTOCK, "demo", *sizes, "--steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as started:
        for line in started.stdout:
            if line.startswith("step 1 "):
                break
        processes = children(started.pid)
        assert len(processes) == 3  # the ranks, and the one that looks after them
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 130
        said = started.stderr.read()
    stopped = int(re.fullmatch(r"penstock: stopped after step (\d+); add --resume to go on from there\n", said)[1])
    assert gone(processes)
    resumed = launched(tmp_path, "--resume", *sizes, "--steps", str(stopped + 2))
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert f"resumed after step {stopped}, loss" in resumed.stdout


@pytest.mark.processes
def test_no_process_is_left_behind_by_a_kill(tmp_path):
    command = [PENSTOCK, "demo", "--ranks", "2", "--schedule", "1F1B", "--steps", "100000", "-m", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as started:
        for line in started.stdout:
            if line.startswith("step 1 "):
                break
        processes = children(started.pid)
        assert len(processes) == 3  # the ranks, and the one that looks after them
        started.kill()
        assert started.wait(30) == -9
    assert gone(processes)


@pytest.mark.processes
def test_an_interrupt_while_torch_is_imported_says_nothing(tmp_path):
    command = [PENSTOCK, "demo", "--ranks", "2", "--schedule", "1F1B", "-m", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as started:
        for line in started.stdout:
            if line.startswith("profiling the"):
                break
        end = time.monotonic() + 30
        while len(children(started.pid)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 130
        assert started.stderr.read() == ""


def test_the_figures_are_explained():
    assert results.explain(1, 2, 2) == ["predicted from the profile; measured in the last step"]
    figures, shared = results.explain(5, 4, 2)
    assert figures == "predicted from the profile; measured in the step of median length among the last 5"
    assert shared.startswith("4 ranks share 2 cores here")


def test_a_wide_picture_is_folded_in_a_pipe(capsys):
    chosen = choose_schedule(ps.build("1F1B", ranks=2, microbatches=40), ps.Costs(forward=[1] * 10), list("abcdefghij"))
    command._proved(command.terminal(80), chosen)
    picture = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "rank"))]
    assert len(picture) > 6
    assert max(map(len, picture)) <= 80


def test_layers_are_cut_for_a_given_schedule_by_their_costs():
    schedule = ps.build("1F1B", ranks=2, microbatches=4)
    chosen = choose_schedule(schedule, ps.Costs(forward=[1, 1, 1, 1, 1, 7]), list("abcdef"))
    assert chosen.layout == [list("abcd"), list("ef")] or chosen.layout == [list("abcde"), ["f"]]
    assert chosen.schedule == schedule


def test_what_cannot_be_trained():
    unknown = penstock("demo", "--schedule", "ZBVZeroBuble")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("penstock: unknown schedule 'ZBVZeroBuble'; did you mean ZBVZeroBubble")
    forward = penstock("demo", "--schedule", "ForwardOnly")
    assert (forward.returncode, forward.stdout) == (2, "")
    assert forward.stderr == (
        "penstock: ForwardOnly has no backward, so nothing would be trained; try --schedule 1F1B\n"
    )


def test_without_torch(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ps.RunError, match=r"not installed: pip install 'penstock\[torch\]'"):
        command._check_torch()


def test_a_checkpoint_that_has_all_steps_says_how_to_go_on(capsys):
    listener = Listener(command.terminal(80), 10)
    listener.on_line(
        0, False, json.dumps({"event": "start", "parameters": 1, "tokens": 1, "first": 12, "losses": [2.5] * 12})
    )
    said = capsys.readouterr().out
    assert "resumed after step 12, loss 2.500" in said
    assert "the checkpoint has 12 steps already; --steps 24 trains on" in said
    assert listener.is_complete


def test_there_is_nothing_to_resume(tmp_path):
    result = penstock("demo", "--resume", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "penstock: there is no checkpoint in penstock-demo; omit --resume to begin, or name its folder with --output\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    mine = tmp_path / "checkpoint" / "weights"
    mine.parent.mkdir()
    mine.write_text("precious")
    result = penstock("demo", "--output", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert "is not a checkpoint of the demo, which would replace it; choose another --output" in result.stderr
    assert mine.read_text() == "precious"


def test_held_memory_is_what_the_graph_holds():
    layers = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(3)))
    held = HeldMemory(layers.parameters())
    with held.watching():
        out = layers(torch.ones(5, 10, requires_grad=True))
        assert held.now == held.peak == 3 * 200  # the output of each layer
        out.sum().backward()
    del out
    assert (held.now, held.peak) == (0, 600)


def test_wrong_gradients_are_seen():
    def weights(*gradients):
        found = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
        for parameter, gradient in zip(found.values(), gradients, strict=True):
            parameter.grad = None if gradient is None else torch.tensor(gradient)
        return found

    right = weights([1.0, -4.0], [0.0, 2.0])
    assert differences(right, right).tolist() == [0.0, 4.0]
    assert differences(weights([1.0, -4.0], [0.0, 2.5]), right).tolist() == [0.5, 4.0]
    assert differences(weights([1.0, -4.0], None), right)[0] == torch.inf
    assert differences(weights([1.0, -4.0], [0.0, torch.nan]), right)[0] == torch.inf
