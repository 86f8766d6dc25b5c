"""``penstock run`` without a rank: its options, what ranks get, and what is said of how they ended."""

import os
import re

import pytest

from cli.commands import penstock
from penstock.cli.launch import Outcome, RankExit, environment_of


def test_what_is_set_stays():
    fresh = environment_of(1, 2, 5000, {"PATH": "/bin"})
    assert fresh["TORCH_CPP_LOG_LEVEL"] == "ERROR"  # or torch prints frames of C++ when another rank exits
    assert (fresh["GLOO_SOCKET_IFNAME"], fresh["RANK"], fresh["MASTER_PORT"]) == ("lo", "1", "5000")
    assert int(fresh["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    kept = environment_of(
        0, 64, 5000, {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0", "RANK": "9", "TORCHELASTIC_RUN_ID": "x"}
    )
    assert (kept["OMP_NUM_THREADS"], kept["GLOO_SOCKET_IFNAME"], kept["RANK"]) == ("3", "eth0", "0")
    assert "TORCHELASTIC_RUN_ID" not in kept
    assert environment_of(0, 64, 5000, {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("outcome", "code", "summary"),
    [
        (Outcome(), 0, ""),
        (Outcome(timed_out=True), 124, "timed out (--timeout); all processes were terminated"),
        (
            Outcome((RankExit(2, -9), RankExit(0, 1), RankExit(1, 1)), timed_out=True),
            137,
            "rank 2 was killed by SIGKILL, ranks 0 and 1 failed with exit code 1",
        ),
        (
            Outcome((RankExit(2, -6), RankExit(3, -6), RankExit(0, 137), RankExit(1, 1))),
            134,
            "ranks 2 and 3 were killed by SIGABRT, rank 0 failed with exit code 137, rank 1 with exit code 1",
        ),
        (
            Outcome((RankExit(1, 1),), ended=(0, 2)),
            1,
            "rank 1 failed with exit code 1; ranks 0 and 2 were then terminated",
        ),
    ],
)
def test_the_summary_of_an_outcome(outcome, code, summary):
    assert (outcome.code, outcome.summary) == (code, summary)


def test_bad_usage(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    missing = penstock("run", "nowhere.py")
    assert missing.returncode == 2
    assert "file nowhere.py does not exist; add --module to run a module" in missing.stderr
    directory = penstock("run", ".")
    assert directory.returncode == 2
    assert ". is a directory" in directory.stderr
    theirs = penstock("run", "--nproc-per-node", "2", str(script))
    assert theirs.returncode == 2
    assert "this is torchrun's option; use --ranks 2" in theirs.stderr
    assert penstock("run", "-r", "0", str(script)).returncode == 2
    assert penstock("run", "--timeout", "0", str(script)).returncode == 2


def test_the_nearest_command():
    assert "No such command 'shwo'. Did you mean show?" in penstock("shwo").stderr
    far = penstock("trian")
    assert far.returncode == 2
    assert "No such command 'trian'. The commands are show, check, simulate, " in " ".join(far.stderr.split())


def test_help_names_what_is_set():
    named = set(re.findall(r"[A-Z]+(?:_[A-Z]+)+|RANK|PYTHONUNBUFFERED", penstock("run", "--help").stdout))
    assert named == set(environment_of(0, 1, 5000, {}))


def test_help_has_an_example():
    assert "Example: penstock run --ranks 4 train.py" in " ".join(penstock("run", "--help").stdout.split())
