"""``examples/training.py``: stopped by SIGTERM and resumed by the same command, it trains as if it had not been."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[1] / "examples" / "training.py"
PENSTOCK = Path(sys.executable).parent / "penstock"
STEPS = 120


def command(folder):
    return [str(part) for part in (PENSTOCK, "run", "--ranks", 2, EXAMPLE, folder, "--steps", STEPS)]


def losses_of(folder):
    return (folder / "losses.txt").read_text().splitlines()


def stop(started, folder):
    """Send SIGTERM when the first steps are done; returns the exit code."""
    file = folder / "losses.txt"
    while started.poll() is None and not (file.exists() and file.read_text().count("\n") >= 3):
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    return started.wait(60)


def test_a_stopped_run_goes_on_with_the_same_losses(tmp_path):
    whole = subprocess.run(command(tmp_path / "whole"), capture_output=True, text=True, check=True, timeout=120)
    assert f"step {STEPS}/{STEPS}  loss " in whole.stderr
    resumed = tmp_path / "resumed"
    with subprocess.Popen(command(resumed), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert stop(started, resumed) == 0, started.stderr.read()
    done = len(losses_of(resumed))
    assert 3 <= done < STEPS
    assert [path.name for path in resumed.glob("step-*")] == [f"step-{done}"]
    subprocess.run(command(resumed), capture_output=True, text=True, check=True, timeout=120)
    assert losses_of(resumed) == losses_of(tmp_path / "whole")
    assert [int(line.split()[0]) for line in losses_of(resumed)] == list(range(1, STEPS + 1))
