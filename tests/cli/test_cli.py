import json
import os
import pty
import re
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from time import monotonic

import pytest

import penstock as ps
from cli.commands import penstock

PENSTOCK = str(Path(sys.executable).parent / "penstock")
ZOO = Path(__file__).parent.parent / "fixtures" / "zoo"


def in_a_terminal(*arguments, columns=60, lines=24, pager="cat"):
    """What the command writes to a real terminal of this size."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(lines), PAGER=pager)
        for name in ("NO_COLOR", "CI"):
            os.environ.pop(name, None)
        os.execv(PENSTOCK, [PENSTOCK, *arguments])
    written, end = b"", monotonic() + 60
    with suppress(OSError):  # a terminal that is closed answers with an error
        while monotonic() < end and select.select([terminal], [], [], 60)[0]:
            if not (piece := os.read(terminal, 65536)):
                break
            written += piece
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, written.decode().replace("\r\n", "\n")


def without_colour(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_show_draws_the_grid():
    result = penstock("show", "1F1B", "--ranks", "2", "--microbatches", "3")
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout == dedent("""\
        step   0   1   2   3   4   5   6   7
        rank 0 0F0 0F1 .   0B0 0F2 0B1 .   0B2
        rank 1 .   1F0 1B0 1F1 1B1 1F2 1B2

        # F forward   B backward   . idle
        # Schedule 1F1B: 2 ranks, 2 stages, 3 microbatches, 12 actions
    """)


def test_a_pipe_gets_whole_lines():
    result = penstock("show", "interleaved1f1b", "-r", "2", "-m", "40", "-s", "3")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["step", "rank", "rank"]
    assert len(lines[1]) > 900
    assert "6 stages, 40 microbatches" in lines[-1]


@pytest.mark.processes
def test_a_closed_pipe_is_no_failure_of_ours():
    command = f"{PENSTOCK} show 1F1B -r 64 -m 300 --width 80 | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.startswith("step")
    assert result.stderr == ""


def test_show_fits_a_given_width():
    result = penstock("show", "DualPipeV", "-r", "2", "-m", "6", "--width", "50")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 50
    assert sum(line.startswith("step") for line in lines) > 3
    cells = " ".join(line[6:] for line in lines if line.startswith("rank 0")).split()
    assert [c for c in cells if c != "."] == [str(a) for a in ps.build("DualPipeV", ranks=2, microbatches=6).actions[0]]


@pytest.mark.processes
def test_show_in_a_terminal_has_colour_and_fits():
    status, written = in_a_terminal("show", "ZBVZeroBubble", "-r", "2", "-m", "4", columns=60)
    assert status == 0
    assert "\x1b[1;34m0F0\x1b[0m" in written
    lines = without_colour(written).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("step") for line in lines) == 2


@pytest.mark.processes
def test_long_ones_are_paged():
    status, written = in_a_terminal("show", "1F1B", "-r", "8", "-m", "64", columns=60, lines=24, pager="head -n 3")
    assert status == 0
    assert len(written.splitlines()) == 3
    assert "\x1b[1;34m0F0" in written


@pytest.mark.processes
def test_short_ones_are_not_paged():
    _, written = in_a_terminal("show", "1F1B", "-r", "2", "-m", "2", pager="false")
    assert "rank 1" in without_colour(written)


def test_show_without_a_name_lists_the_schedules():
    result = penstock("show")
    assert result.returncode == 0
    for name in ("GPipe", "V-Half", "DualPipeV"):
        assert name in result.stdout
    known = json.loads(penstock("show", "--json").stdout)
    assert known[2]["name"] == "1F1B"


def test_show_a_file_and_its_json():
    result = penstock("show", str(ZOO / "unbalanced.txt"))
    assert "rank 1 .   .   2F0 3F0 .   .   3B0 2B0 .   ." in result.stdout
    document = json.loads(penstock("show", str(ZOO / "unbalanced.txt"), "--json").stdout)
    assert [entry["stages"] for entry in document["ranks"]] == [[0, 1, 4], [2, 3]]


def test_what_is_shown_can_be_read_again(tmp_path):
    (tmp_path / "saved.txt").write_text(penstock("show", "1F1B", "-r", "3", "-m", "4").stdout)
    saved = ps.read(tmp_path / "saved.txt")
    built = ps.build("1F1B", ranks=3, microbatches=4)
    assert [[cell for cell in row if cell] for row in saved.actions] == [list(row) for row in built.actions]


def test_what_cannot_run_is_shown_with_a_remark(tmp_path):
    (tmp_path / "stuck.csv").write_text("0B0,0F0\n")
    result = penstock("show", "stuck.csv", cwd=tmp_path)
    assert "# this schedule does not run: rank 0 waits forever at step 0: 0B0 needs 0F0" in result.stdout


@pytest.mark.processes
def test_a_full_disk_is_one_message():
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([PENSTOCK, "show", "1F1B"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "penstock: [Errno 28] No space left on device\n"


@pytest.mark.processes
def test_as_a_module():
    command = [sys.executable, "-m", "penstock", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("penstock ")


def test_as_written():
    result = penstock("show", "GPipe", "-r", "2", "-m", "1", "--as-written")
    assert "rank 1 1F0 1B0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "1F2B"], "unknown schedule '1F2B'; did you mean 1F1B?"),
        (["show", "nothing.csv"], "nothing.csv: cannot be read: No such file or directory"),
        (["show", "1F1B", "--ranks", "0"], "ranks must be at least 1, got 0"),
        (["show", "GPipe", "-s", "2"], "GPipe has 1 stage per rank, not 2; omit --stages-per-rank"),
        (["show", str(ZOO / "with_w.txt"), "-r", "2"], "has its own sizes; omit --ranks 2"),
        (["convert", "GPipe", "out.yaml"], "unknown suffix '.yaml'"),
        (["show", "1F1B", "--ranks", "two"], "Invalid value for '--ranks'"),
        (["check", "1F1B", "--model", "pair"], "'pair' is not a communication model; write e.g. 'rendezvous:pair'"),
        (["check", "1F1B", "--model", "sync:pair"], "use 'rendezvous', 'bounded(1)', 'bounded(2)', ... or"),
        (["check", "nothing.csv"], "nothing.csv: cannot be read"),
        (["show", "x" * 300], "unknown schedule"),
        (["convert", "GPipe", "x" * 300 + ".csv"], "File name too long"),
        (["shwo"], "No such command 'shwo'"),
        (["show", "low.cvs"], "low.cvs: unknown suffix '.cvs'; use *.csv, *.json or *.txt"),
        (["show", "."], ".: is a directory; expected a file"),
        (["check", str(ZOO)], "zoo: is a directory; expected a file"),
        (["show", "--ranks", "3"], "Invalid value for --ranks: needs a schedule, e.g. penstock show 1F1B"),
        (["show", "--lower"], "Invalid value for --lower: needs a schedule"),
        (["check", "1F1B", "--memory-limit", "-1"], "Invalid value for '--memory-limit'"),
        (["check", "1F1B", "--memory-limit", "inf"], "inf is not a number of activations; write e.g. 8"),
        (["check", "1F1B", "--width", "3"], "Invalid value for '--width'"),
        (
            ["check", "1F1B", "--defer-receives"],
            "Invalid value for --defer-receives: only applies with --lower",
        ),
        (["show", "1F1B", "--lower", "--look-ahead", "2"], "only applies with --defer-receives"),
        (["convert", "1F1B", "out.csv", "--repair", "pair"], "'pair' is not a communication model"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, expected, tmp_path):
    result = penstock(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_convert_there_and_back(tmp_path):
    for target in ("it.csv", "it.json", "it.txt", "again.csv"):
        source = {"it.csv": str(ZOO / "with_w.txt"), "it.json": "it.csv", "it.txt": "it.json"}.get(target, "it.txt")
        result = penstock("convert", source, target, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == f"{target}: Schedule: 2 ranks, 4 stages, 2 microbatches, 24 actions\n"
    assert ps.read(tmp_path / "again.csv") == ps.read(ZOO / "with_w.txt")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "it.csv").read_bytes()


def test_convert_builds_and_does_not_overwrite_unasked(tmp_path):
    result = penstock("convert", "ZB-H2", "it.json", "-r", "3", "-m", "5", "--json", cwd=tmp_path)
    assert json.loads(result.stdout) == {"target": "it.json", "ranks": 3, "stages": 3, "microbatches": 5}
    refused = penstock("convert", "GPipe", "it.json", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "penstock: it.json: already exists; --force replaces it\n")
    assert ps.read(tmp_path / "it.json") == ps.build("ZB-H2", ranks=3, microbatches=5)
    assert penstock("convert", "GPipe", "it.json", "--force", cwd=tmp_path).returncode == 0
    assert ps.read(tmp_path / "it.json") == ps.build("GPipe", ranks=4, microbatches=8)


def test_check_says_what_is_right():
    result = penstock("check", "1F1B", "--lower", "-r", "2", "-m", "3")
    assert (result.returncode, result.stderr) == (0, "")
    assert "ok: complete, ordered, and free of deadlock under rendezvous, a lane per pair" in result.stdout
    assert "pair          yes         yes         yes" in result.stdout


BROKEN = "0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n"


def test_check_shows_the_cycle_and_the_models(tmp_path):
    (tmp_path / "bad.csv").write_text(BROKEN)
    result = penstock("check", "bad.csv", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    assert "error: rank 0, step 2: rank 0 waits in 0SEND_F0, ahead of 0SEND_F1, for rank 1" in result.stdout
    assert "rank 1 1RECV_F1 1RECV_F0 1F0      1F1\n       ^^^^^^^^ ^^^^^^^^" in result.stdout
    assert "message       yes         yes         yes" in result.stdout
    assert penstock("check", "bad.csv", "--model", "eager:direction", cwd=tmp_path).returncode == 0


def test_check_for_machines(tmp_path):
    (tmp_path / "bad.csv").write_text(BROKEN)
    result = penstock("check", "bad.csv", "--json", cwd=tmp_path)
    assert result.returncode == 1
    document = json.loads(result.stdout)
    (finding,) = document["findings"]
    assert (finding["kind"], finding["rank"], finding["step"], finding["action"]) == ("deadlock", 0, 2, "0SEND_F0")
    assert sorted(map(tuple, finding["marks"])) == [(0, 2), (0, 3), (1, 0), (1, 1)]
    safe = {(row["buffering"], row["lanes"]) for row in document["models"] if row["free_of_deadlock"]}
    assert ("eager", "pair") in safe
    assert ("rendezvous", "pair") not in safe
    assert (document["ok"], document["memory"]) == (False, None)
    good = json.loads(penstock("check", "ZB-H1", "--json", "--memory-limit", "4").stdout)
    assert (good["ok"], good["findings"], good["models"]) == (True, [], None)
    assert good["memory"] == {"limit": 4, "peak": [4, 4, 4, 4]}


def test_check_of_what_cannot_be_lowered(tmp_path):
    (tmp_path / "bad.csv").write_text("0B0,0F0\n")
    result = penstock("check", "bad.csv", "--lower", "--json", cwd=tmp_path)
    assert result.returncode == 1
    assert json.loads(result.stdout)["findings"][0]["kind"] == "backward_before_input"


def test_check_with_a_memory_limit():
    result = penstock("check", "GPipe", "--memory-limit", "3")
    assert result.returncode == 1
    assert "0F3 brings the rank to 4 activations; the limit is 3" in result.stdout

    result = penstock("check", "1F1B", "--memory-limit", "4")
    assert result.returncode == 0
    assert "memory: at most 4 activations on a rank (rank 0); the limit is 4" in result.stdout
    assert "memory" not in penstock("check", "1F1B").stdout


@pytest.mark.processes
def test_check_folds_the_picture_with_its_marks(tmp_path):
    (tmp_path / "bad.csv").write_text(
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
    )
    folded = """\
        step   0        1        2        3   4
        rank 0 0F0      0SEND_F0 0RECV_B0 0B0 0F1
                                          ^^^
        rank 1 1RECV_F0 1RECV_F1 1F0      1F1 1B0
                                          ^^^

        step   5        6        7
        rank 0 0SEND_F1 0RECV_B1 0B1
               ^^^^^^^^
        rank 1 1SEND_B0 1B1      1SEND_B1
               ^^^^^^^^
    """
    _, written = in_a_terminal("check", str(tmp_path / "bad.csv"), columns=48)
    asked = penstock("check", "bad.csv", "--width", "48", cwd=tmp_path).stdout
    for output in (without_colour(written), asked):
        assert dedent(folded) in output
        assert max(map(len, output.splitlines())) <= 48


@pytest.mark.processes
@pytest.mark.parametrize("columns", ["0", "1", "12"])
def test_a_terminal_that_says_it_has_no_width(columns, tmp_path):
    (tmp_path / "bad.csv").write_text(BROKEN)
    for arguments, expected in (
        (["show", "1F1B", "-r", "2", "-m", "2"], "rank 1 .   1F0 1B0"),
        (["check", str(tmp_path / "bad.csv")], "message       yes         yes         yes"),
        (["show"], "GPipe"),
    ):
        _, written = in_a_terminal(*arguments, columns=columns)
        assert expected in without_colour(written)


def test_lower_to_a_file_and_on_the_screen(tmp_path):
    options = ["--lower", "--defer-receives", "--look-ahead", "1", "--no-unshard"]
    assert penstock("convert", "1F1B", "low.csv", "-r", "2", "-m", "3", *options, cwd=tmp_path).returncode == 0
    built = ps.build("1F1B", ranks=2, microbatches=3)
    assert ps.read(tmp_path / "low.csv") == ps.lower(built, defer_receives=True, look_ahead=1, unshard=False)
    shown = penstock("show", "GPipe", "-r", "2", "-m", "1", "--lower", "--no-unshard").stdout
    assert "rank 1 1RECV_F0 1F0      1B0      1SEND_B0 1REDUCE_GRAD" in shown
    merged = penstock("show", "ZB-H1", "-r", "1", "-m", "1", "--lower", "--merge-backward").stdout
    assert "rank 0 0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD" in merged
    assert penstock("show", "low.csv", "--lower", cwd=tmp_path).returncode == 2


def test_check_of_deferred_receives_goes_by_the_model():
    deferred = ["check", "1F1B", "-r", "2", "-m", "3", "--lower", "--defer-receives"]
    assert penstock(*deferred, "--model", "rendezvous:message").returncode == 0
    stuck = penstock(*deferred, "--model", "rendezvous:pair")
    assert stuck.returncode == 1
    assert "rank 0 waits in 0SEND_F1, ahead of 0RECV_B0" in stuck.stdout


def test_repair_to_a_file(tmp_path):
    (tmp_path / "bad.csv").write_text(BROKEN)
    assert penstock("convert", "bad.csv", "good.csv", "--repair", "rendezvous:pair", cwd=tmp_path).returncode == 0
    assert ps.read(tmp_path / "good.csv") == ps.repair(ps.read(tmp_path / "bad.csv"))
    (tmp_path / "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    refused = penstock("convert", "stuck.csv", "never.csv", "--repair", "rendezvous:pair", cwd=tmp_path)
    assert refused.returncode == 1
    assert "no order of transfers can help" in refused.stderr
    assert not (tmp_path / "never.csv").exists()


def test_what_is_missing_in_a_file_is_reported_without_python_alone(tmp_path):
    (tmp_path / "gap.csv").write_text("0F0\n2F0\n")
    assert "pass placement= (or use a .json file)" in penstock("show", "gap.csv", cwd=tmp_path).stderr
    (tmp_path / "half.csv").write_text("1F\n")
    assert penstock("show", "half.csv", cwd=tmp_path).stderr == (
        "penstock: half.csv, row 1, cell 1: '1F' is not an action: F needs a microbatch; write e.g. '1F0'\n"
    )


def test_a_file_of_another_kind_is_not_an_unknown_schedule(tmp_path):
    (tmp_path / "notes").write_text(BROKEN)
    refused = penstock("check", "notes", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (
        2,
        "penstock: notes: the file name has no suffix; use *.csv, *.json or *.txt\n",
    )
    (tmp_path / "gpipe").mkdir()
    assert penstock("show", "gpipe", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("command", ["show", "check", "convert", "run", "demo"])
def test_help_has_an_example(command):
    help_text = penstock(command, "--help").stdout
    assert f"Example: penstock {command}" in help_text
    assert penstock(command, "-h").stdout == help_text


@pytest.mark.processes
def test_interrupted_while_it_starts(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    command = [sys.executable, "-m", "penstock", "show"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_version():
    assert penstock("--version").stdout == f"penstock {ps.__version__}\n"


def test_edges_beyond_the_chain(tmp_path):
    schedule = ps.build("1F1B", ranks=3, microbatches=1)
    schedule.with_edges([*schedule.edges, ps.Edge(0, (2,), "skip")]).write(tmp_path / "skip.json")
    shown = penstock("show", "skip.json", "--lower", "--no-unshard", cwd=tmp_path).stdout
    assert shown.startswith("edges: 0>1 0>2 1>2\nstep ")
    assert "0SEND_F0@2" in shown
    assert penstock("check", "skip.json", "--lower", cwd=tmp_path).returncode == 0
    refused = penstock("convert", "skip.json", "skip.csv", cwd=tmp_path)
    assert refused.returncode == 2
    assert "PyTorch's CSV holds chains only, but the schedule has edge 0>2 (skip)" in " ".join(refused.stderr.split())
    assert penstock("convert", "skip.json", "skip.txt", cwd=tmp_path).returncode == 0
    assert ps.read(tmp_path / "skip.txt") == ps.read(tmp_path / "skip.json")
    (tmp_path / "costs.toml").write_text("activation_bytes = [10, 50, 10]\nbandwidth = 100\n")
    reported = penstock("simulate", "skip.json", "--costs", "costs.toml", cwd=tmp_path).stdout
    assert "bytes sent by all ranks: 140" in reported
    facts = json.loads(penstock("simulate", "skip.json", "--costs", "costs.toml", "--json", cwd=tmp_path).stdout)
    assert [rank["bytes_sent"] for rank in facts["ranks"]] == [60, 20, 60]
