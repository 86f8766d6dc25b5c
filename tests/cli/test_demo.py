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
from penstock.cli import demo
from penstock.runtime.demo.__main__ import TOLERANCE, differences
from penstock.runtime.demo.model import assign_layers

PENSTOCK = str(Path(sys.executable).parent / "penstock")
LIMIT = 240
"""Seconds: on a quiet machine a run takes ten."""


def launched(*arguments):
    plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    return subprocess.run([PENSTOCK, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT, env=plain)


def children(process):
    """The processes that it has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{process}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


@pytest.mark.processes
def test_for_machines():
    result = launched("demo", "--json", "--ranks", "2", "--schedule", "1f1b", "--steps", "4", "--microbatches", "3")
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert {name: facts[name] for name in ("schedule", "ranks", "stages", "microbatches", "findings")} == {
        "schedule": "1F1B",
        "ranks": 2,
        "stages": 2,
        "microbatches": 3,
        "findings": [],
    }
    assert facts["actions_when_lowered"] == sum(map(len, ps.lower(ps.build("1F1B", ranks=2, microbatches=3)).actions))
    assert len(facts["losses"]) == 4
    assert facts["gradients"]["right"]
    assert facts["gradients"]["difference"] <= TOLERANCE * facts["gradients"]["largest"]
    assert facts["tokens_per_second"] > 0
    for figures in (facts["predicted"], facts["measured"]):
        assert len(figures["ranks"]) == 2
        assert all(rank["busy"] > 0 for rank in figures["ranks"])
        assert all(rank["busy"] + rank["idle"] == pytest.approx(figures["makespan"]) for rank in figures["ranks"])
        assert max(rank["ends"] for rank in figures["ranks"]) == pytest.approx(figures["makespan"])


@pytest.mark.processes
def test_it_learns():
    result = launched("demo", "--steps", "30", "--microbatches", "4")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Schedule ZBVZeroBubble: 4 ranks, 8 stages, 4 microbatches" in result.stdout
    assert re.search(r"lowered to \d+ actions: complete, ordered, free of deadlock \(under 12 of 12", result.stdout)
    assert "gradients of the first step match the unsplit model" in result.stdout
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\d\.\d{3})$", result.stdout, re.M)
    }
    assert list(losses) == [1, *range(3, 31, 3)]
    assert losses[1] > 5
    assert losses[30] < 3.7
    table = result.stdout.partition("busy")[2]
    assert re.findall(r"^ +(\d)(?: +[\d.]+ ms){6}$", table, re.M) == ["0", "1", "2", "3"]
    assert re.search(r"a step: predicted [\d.]+ ms, measured [\d.]+ ms", table)


@pytest.mark.processes
def test_in_a_terminal():
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        for name in ("NO_COLOR", "CI"):
            os.environ.pop(name, None)
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
        assert re.search(rf"training .*{number}/4 loss \d\.\d{{3}}  [\d,]+ tokens/s", shown)
    assert "step 1 loss" not in shown


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(number):
    command = [PENSTOCK, "demo", "--ranks", "2", "--schedule", "1F1B", "--steps", "100000", "-m", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        for line in started.stdout:
            if line.startswith("step 1 "):
                break
        processes = children(started.pid)
        assert len(processes) == 3  # the ranks, and the one that looks after them
        started.send_signal(number)
        assert started.wait(30) == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
        assert started.stderr.read() == ""
    end = time.monotonic() + 20
    while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


@pytest.mark.processes
def test_an_interrupt_while_torch_is_imported_says_nothing():
    command = [PENSTOCK, "demo", "--ranks", "2", "--schedule", "1F1B", "-m", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        for line in started.stdout:
            if line.startswith("if B "):
                break
        end = time.monotonic() + 30
        while len(children(started.pid)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 130
        assert started.stderr.read() == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1F1B", "if B took twice as long as F"),
        ("ZBVZeroBubble", "if F, I and W took the same"),
        ("InterleavedZeroBubble", "if F, I and W took the same"),
    ],
)
def test_what_is_assumed(name, message):
    assert demo._assumed(ps.build(name, ranks=2, microbatches=4)).startswith(message)


def test_the_figures_are_explained(monkeypatch):
    monkeypatch.setattr(demo, "cores", lambda: 2)
    assert demo._explained(1, 2) == [
        "measured in the last step; predicted from the time of each action in it, without waiting"
    ]
    figures, shared = demo._explained(5, 4)
    assert figures.startswith("measured in the step of median length among the last 5; ")
    assert shared.startswith("4 ranks share 2 cores here")


def test_a_wide_picture_is_folded_in_a_pipe(capsys):
    demo._proved(demo.terminal(80), ps.build("1F1B", ranks=2, microbatches=40))
    picture = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "rank"))]
    assert len(picture) > 6
    assert max(map(len, picture)) <= 80


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
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ps.RunError, match=r"not installed: pip install 'penstock\[torch\]'"):
        demo._check_trainable("1F1B", ps.build("1F1B", ranks=2, microbatches=2))


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


@pytest.mark.parametrize(("blocks", "stages"), [(8, 1), (8, 3), (8, 8), (16, 16)])
def test_every_layer_is_in_one_stage(blocks, stages):
    pieces = assign_layers(blocks, stages)
    assert [layer for piece in pieces for layer in piece] == list(range(blocks + 2))
    sizes = [len(set(piece) - {0, blocks + 1}) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
