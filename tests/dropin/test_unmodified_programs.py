"""A program for torch's package runs on ours, unmodified, in all of its processes."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PROGRAM = str(Path(__file__).with_name("program.py"))
PROGRAMS = Path(sys.executable).parent
NOTICE = re.compile(r"penstock: torch\.distributed\.pipelining is penstock\.pipelining \S+ in this program\n")


@cache
def run(*command):
    done = subprocess.run(
        [str(PROGRAMS / command[0]), *command[1:]], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def losses(text):
    return re.findall(r"step \d loss \S+", text)


OURS = ["penstock", "run", "--ranks", "2", "--no-prefix", "--drop-in", PROGRAM, "--children"]


def test_every_process_gets_ours_and_the_losses_are_torchs():
    ours, notice = run(*OURS)
    theirs, nothing = run("penstock", "run", "--ranks", "2", "--no-prefix", PROGRAM)
    assert losses(ours) == losses(theirs)
    assert len(losses(ours)) == 4
    assert "schedules of torch.distributed.pipelining.schedules\n" in theirs
    assert "schedules of penstock.pipelining.schedules\n" in ours
    assert "modules of penstock.pipelining\n" in ours
    assert "spawned penstock.pipelining.schedules\n" in ours
    assert "interpreter penstock.pipelining.schedules\n" in ours
    assert len(NOTICE.findall(notice)) == 1
    assert "penstock" not in nothing


@pytest.mark.full  # docs/drop-in.md has a shorter one
def test_under_torchrun():
    text, notice = run("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "penstock.dropin", PROGRAM)
    assert losses(text) == losses(run(*OURS)[0])
    assert len(NOTICE.findall(notice)) == 1
