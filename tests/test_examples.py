"""The examples run, and with torch's package in place of ours they tell the same losses."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = Path(sys.executable).parent


def told(script, *arguments, ranks=2, launcher="penstock"):
    """The lines about losses."""
    start = {
        "penstock": ["penstock", "run", "--ranks", str(ranks), "--no-prefix", "--timeout", "280"],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", str(ranks)],
    }[launcher]
    command = [str(PROGRAMS / start[0]), *start[1:], str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^step \d+ .*$", done.stdout, re.MULTILINE)


@cache
def ours(name, *arguments):
    """An example as it is."""
    return told(EXAMPLES / name, *arguments)


def with_torch(script, folder):
    """The same script, with nothing but the imports changed."""
    text = script.read_text()
    changed = re.sub(r"^from penstock\.pipelining\b", "from torch.distributed.pipelining", text, flags=re.MULTILINE)
    assert changed != text
    assert not re.search(r"^(from|import) penstock", changed, re.MULTILINE)
    copy = folder / script.name
    copy.write_text(changed)
    return copy


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("one_stage_per_rank.py", ["--schedule", "1F1B"]),
        ("several_stages_per_rank.py", ["--schedule", "Interleaved1F1B", "--evaluate"]),
        ("several_stages_per_rank.py", ["--schedule", "ZBVZeroBubble"]),
    ],
)
def test_only_the_import_changes(name, arguments, tmp_path):
    lines = ours(name, *arguments)
    assert len(lines) == (10 if "--evaluate" in arguments else 8)
    assert lines == told(with_torch(EXAMPLES / name, tmp_path), *arguments)
    losses = [float(line.split()[-1]) for line in lines]
    assert losses[-1] < losses[0]


def test_an_evaluation_in_a_v():
    lines = ours("several_stages_per_rank.py", "--schedule", "DualPipeV", "--evaluate")
    assert sum("evaluated" in line for line in lines) == 2


def test_under_torchrun():
    name, arguments = "one_stage_per_rank.py", ["--schedule", "1F1B"]
    assert told(EXAMPLES / name, *arguments, launcher="torchrun") == ours(name, *arguments)
