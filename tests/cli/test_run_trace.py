"""``penstock run --trace``: what the ranks did is there at the end, however the run ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.simulation.timeline_json import read_timeline

pytestmark = pytest.mark.processes

PENSTOCK = str(Path(sys.executable).parent / "penstock")

TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
import penstock as ps
from penstock.runtime import Pipeline

class Slow(torch.nn.Linear):
    def forward(self, value):
        time.sleep(0.005)
        return super().forward(value)

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
pipe = Pipeline({rank: Slow(4, 4)}, ps.build("1F1B", ranks=2, microbatches=3), loss_fn=torch.nn.functional.mse_loss)
batch = torch.ones(6, 4)
for step in range(1000 if "forever" in sys.argv else 4):
    if step == 3 and rank == 1 and "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.step(*([batch] if pipe.has_first else []), target=batch)
    if step == 3:
        print("running", flush=True)
pipe.close()
dist.destroy_process_group()
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def traced(train, output, *arguments, ranks=2):
    command = [PENSTOCK, "run", "--ranks", str(ranks), "--trace", str(output), train, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def check(timeline):
    assert [timeline.schedule.ranks, timeline.schedule.microbatches] == [2, 3]
    forwards = [span for span in timeline.spans if span.action.computation_type.value == "F"]
    assert len(forwards) == 6
    assert all(span.end - span.start >= 0.005 for span in forwards)


def test_a_run_that_ends_well(tmp_path, train):
    result = traced(train, tmp_path / "measured.json")
    assert result.returncode == 0, result.stderr
    assert f"penstock: wrote {tmp_path}/measured.json: 1F1B, measured: median of the last 4 steps" in result.stderr
    check(read_timeline(tmp_path / "measured.json"))


def test_a_rank_that_is_killed(tmp_path, train):
    result = traced(train, tmp_path / "measured.html", "killed")
    assert result.returncode == 128 + signal.SIGKILL
    assert "measured.html: 1F1B, measured: median of the last 3 steps" in result.stderr
    assert '"title":"1F1B, measured: median of the last 3 steps"' in (tmp_path / "measured.html").read_text()


def test_ctrl_c(tmp_path, train):
    command = [PENSTOCK, "run", "--ranks", "2", "--trace", str(tmp_path / "measured.json"), train, "forever"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout.readline().endswith("running\n")
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "measured.json: 1F1B, measured: median of the last" in errors
    check(read_timeline(tmp_path / "measured.json"))


def test_a_script_without_a_pipeline(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('hello')")
    result = traced(str(script), tmp_path / "measured.html")
    assert result.returncode == 0
    assert "no step was traced: only steps of penstock.runtime.Pipeline are" in result.stderr
    assert not (tmp_path / "measured.html").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("measured.xml", "unknown suffix; use *.html, *.json"), ("missing/measured.html", "there is no folder")],
)
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, name, message):
    script = tmp_path / "script.py"
    script.write_text("print('hello')")
    result = traced(str(script), tmp_path / name)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
