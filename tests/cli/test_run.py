import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cli.launch import launch

pytestmark = pytest.mark.processes

PENSTOCK = str(Path(sys.executable).parent / "penstock")

#: Writes the process ids of a rank and of a child of its own, which would live on.
STAYS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("ids", os.getpid(), child.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def handlers():
    """A process that was interrupted in ``launch`` is to end, and is not to be interrupted again: this one goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}")
        return str(path)

    return write


def penstock(*arguments, limit=60, **options):
    return subprocess.run([PENSTOCK, *arguments], capture_output=True, text=True, check=False, timeout=limit, **options)


def is_alive(process):
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ids_of(started, ranks):
    """What ``STAYS`` has written on every rank."""
    found = []
    for _ in range(ranks):
        found += map(int, re.search(r"ids (\d+) (\d+)", started.stdout.readline()).groups())
    return found


def gone(processes, within=10.0):
    end = time.monotonic() + within
    while any(map(is_alive, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_alive, processes))


def test_every_rank_gets_its_place_and_the_arguments(script):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    result = penstock(
        "run", "--ranks", "3", script(f"print(*[os.environ[n] for n in {names}], *sys.argv[1:])"), "--ranks", "7", "-h"
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = sorted(result.stdout.splitlines())
    port = lines[0].split()[7]
    assert lines == [f"rank {rank}: {rank} 3 {rank} 3 127.0.0.1 {port} --ranks 7 -h" for rank in range(3)]
    assert 1024 <= int(port) < 65536


def test_lines_stay_whole(script):
    text = """
for number in range(300):
    for letter in f"{rank}" * 40:
        sys.stdout.write(letter); sys.stdout.flush()
    print()
sys.stderr.write(f"{rank} has no end of line")
"""
    result = penstock("run", "-r", "3", "--no-prefix", script(text))
    lines = result.stdout.splitlines()
    assert len(lines) == 900
    assert set(lines) == {f"{rank}" * 40 for rank in range(3)}
    assert sorted(result.stderr.splitlines()) == [f"{rank} has no end of line" for rank in range(3)]


def test_progress_bars_are_lines(script):
    result = penstock("run", "-r", "2", script("sys.stdout.write('\\r10%\\r20%\\r100%\\nend\\r\\n')"))
    mine = [line for line in result.stdout.splitlines() if line.startswith("rank 1")]
    assert mine == ["rank 1: 10%", "rank 1: 20%", "rank 1: 100%", "rank 1: end"]


def test_one_rank_writes_for_itself(script):
    result = penstock("run", "-r", "1", script("print('here')"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "here\n", "")


def test_a_module(tmp_path):
    (tmp_path / "training.py").write_text("import sys; print(__name__, *sys.argv[1:])")
    result = penstock("run", "-r", "1", "--module", "training", "-x", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "__main__ -x\n")


def test_all_that_failed_are_named_and_the_exit_code_is_the_most_telling(script):
    # Rank 1 is the one that has failed for real; the others say what they know, and may be faster.
    text = "time.sleep(1 if rank == 1 else 0); print('done'); sys.exit([1, 3, 1][rank])"
    result = penstock("run", "-r", "3", script(text))
    assert result.returncode == 3
    assert sorted(result.stdout.splitlines()) == [f"rank {rank}: done" for rank in range(3)]
    assert result.stderr in {
        f"penstock: rank 1 failed with exit code 3, ranks {others} with exit code 1\n"
        for others in ("0 and 2", "2 and 0")
    }


def test_a_killed_rank_comes_first(script):
    result = penstock(
        "run", "-r", "3", script("rank == 2 and (time.sleep(1), os.kill(os.getpid(), 9)); sys.exit(1 - rank)")
    )
    assert result.returncode == 137
    assert result.stderr == "penstock: rank 2 was killed by SIGKILL, rank 0 failed with exit code 1\n"


def test_the_others_are_ended_when_one_has_failed(script):
    begun = time.monotonic()
    result = penstock("run", "-r", "2", script("sys.exit('no more') if rank else time.sleep(300)"))
    assert result.returncode == 1
    assert result.stderr == "rank 1: no more\npenstock: rank 1 failed with exit code 1; rank 0 was then terminated\n"
    assert time.monotonic() - begun < 20


def test_a_killed_rank(script):
    result = penstock("run", "-r", "2", script("rank and os.kill(os.getpid(), 9)"))
    assert (result.returncode, result.stderr) == (137, "penstock: rank 1 was killed by SIGKILL\n")


def test_one_that_does_not_listen_is_killed(script):
    deaf = (
        "import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(300)"
    )
    result = penstock("run", "-r", "2", "--timeout", "2", script(deaf))
    assert result.returncode == 124
    assert result.stderr == "penstock: timed out (--timeout); all processes were terminated\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(script, number):
    command = [PENSTOCK, "run", "-r", "2", script(STAYS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        processes = ids_of(started, 2)
        assert all(map(is_alive, processes))
        started.send_signal(number)
        assert started.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert gone(processes)


def test_nothing_is_left_behind_by_a_rank_that_ends(script):
    result = penstock("run", "-r", "2", script(STAYS.replace("time.sleep(300)\n", "")))
    processes = [int(number) for found in re.findall(r"ids (\d+) (\d+)", result.stdout) for number in found]
    assert (result.returncode, len(processes)) == (0, 4)
    assert gone(processes)


def test_an_interrupt_is_the_scripts_to_handle(script):
    text = """
try:
    print("up", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    print("saved", flush=True)
"""
    command = [PENSTOCK, "run", "-r", "2", script(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        for _ in range(2):
            started.stdout.readline()
        started.send_signal(signal.SIGINT)
        assert sorted(started.stdout.read().splitlines()) == ["rank 0: saved", "rank 1: saved"]
        assert started.wait(10) == 130
        assert started.stderr.read() == "penstock: interrupted; all processes have ended\n"


def test_no_line_is_lost_or_printed_twice_at_an_interrupt(script):
    text = """
try:
    os.write(1, b"one\\ntwo\\nthr")
    time.sleep(300)
except KeyboardInterrupt:
    print("ee")
"""
    heard = []

    def on_line(rank, is_error, line):
        heard.append(line)
        if line == "one":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        launch([sys.executable, script(text)], 1, on_line=on_line)
    assert heard == ["one", "two", "three"]


def test_a_second_interrupt_ends_what_does_not_listen_and_a_listener_that_is_stuck(script):
    processes = []

    def on_line(rank, is_error, line):
        processes.append(int(line))
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        time.sleep(300)

    deaf = "import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\nprint(os.getpid())\ntime.sleep(300)"
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch([sys.executable, script(deaf)], 1, on_line=on_line)
    assert time.monotonic() - begin < 20
    assert len(processes) == 1
    assert gone(processes)


def test_no_process_is_left_behind_however_often_it_is_interrupted(script):
    deaf = (
        "import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\nprint('id', os.getpid())\ntime.sleep(300)"
    )
    command = [PENSTOCK, "run", "-r", "8", script(deaf)]
    for pause in (0.0005, 0.001, 0.002, 0.004):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
            processes = [int(started.stdout.readline().split()[-1]) for _ in range(8)]
            started.send_signal(signal.SIGINT)
            time.sleep(0.2)
            for _ in range(12):
                started.send_signal(signal.SIGINT)
                time.sleep(pause)
            assert started.wait(30) == 130
        assert gone(processes)


def test_a_signal_while_the_ranks_are_started_ends_them(script, monkeypatch):
    """Also two of them: none is an exception before all that is started is known."""
    original = subprocess.Popen
    ranks = []

    def popen(command, **options):
        made = original(command, **options)
        if "preexec_fn" in options:
            ranks.append(made.pid)
            signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        launch([sys.executable, script(STAYS)], 2)
    assert len(ranks) == 2
    assert gone(ranks)


def test_an_interrupt_that_is_ignored_stays_so(script):
    """As it is for what a script starts in the background, which Ctrl-C in the terminal is not meant for."""
    command = [PENSTOCK, "run", "-r", "2", script("print('up')\ntime.sleep(1)\nprint('done')")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    ) as started:
        started.stdout.readline()
        started.send_signal(signal.SIGINT)
        assert started.stdout.read().splitlines()[-2:] in (
            ["rank 0: done", "rank 1: done"],
            ["rank 1: done", "rank 0: done"],
        )
        assert started.wait(10) == 0


@pytest.mark.parametrize("option", [["--ranks", "2"], ["--ranks=2"], ["-r", "2"], ["-r2"]])
def test_ranks_behind_the_script(script, option):
    result = penstock("run", script("print(*sys.argv[1:])"), *option)
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [f"rank {rank}: {' '.join(option)}" for rank in range(4)]
    assert result.stderr == (
        f"penstock: {option[0]} comes after the script, so it is passed to the script; starting 4 ranks. "
        "Put options of penstock run before the script\n"
    )


def test_other_options_behind_the_script(script):
    advice = "comes after the script, so it is passed to the script. Put options of penstock run before the script"
    result = penstock("run", "-r", "1", script(""), "--timeout=3", "-r", "3", "--no-prefix", "--rate", "-recent")
    assert result.stderr.splitlines() == [f"penstock: --no-prefix {advice}", f"penstock: --timeout=3 {advice}"]
    assert penstock("run", "-r", "1", script(""), "--", "--timeout=3").stderr == ""


def test_an_error_in_the_listener_ends_the_processes(script):
    processes = []

    def on_line(rank, is_error, line):
        processes.extend(map(int, line.split()[1:]))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch([sys.executable, script(STAYS)], 1, on_line=on_line)
    assert len(processes) == 2
    assert gone(processes)


def test_the_script_of_the_readme_runs_under_both(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    path = tmp_path / "train.py"
    path.write_text(readme.partition("This is a complete script:\n\n```python\n")[2].partition("```")[0])
    ours = penstock("run", "--ranks", "4", str(path), limit=240)
    assert (ours.returncode, ours.stderr) == (0, "")
    lines = [line.removeprefix("rank 0: ") for line in ours.stdout.splitlines()]
    losses = [float(re.fullmatch(rf"step {step} loss (0\.\d{{4}})", line)[1]) for step, line in enumerate(lines)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 3
    command = [str(Path(PENSTOCK).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    theirs = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert theirs.returncode == 0, theirs.stderr
    assert [float(line.split()[-1]) for line in theirs.stdout.splitlines()] == pytest.approx(losses, abs=2e-3)


def test_a_rank_that_ends_before_it_has_a_pipeline(script):
    """It hosts the store, where the others wait for it."""
    result = penstock(
        "run",
        "--ranks",
        "2",
        script("""
import torch, torch.distributed as dist
import penstock as ps
from penstock.runtime import Pipeline
dist.init_process_group("gloo")
if rank == 0:
    time.sleep(1)
    os._exit(0)
Pipeline({1: torch.nn.Linear(4, 4)}, ps.build("1F1B", ranks=2, microbatches=2), loss_fn=torch.nn.functional.mse_loss)
"""),
    )
    assert result.returncode == 1
    assert "TransportError: rank 1 lost the store while waiting for the other ranks" in result.stderr
