"""``ps.stop_on_signal``: all ranks leave a loop after the same step, whichever of them asks for it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.errors import StageError, StepError
from penstock.runtime import Pipeline, run_in_threads
from runtime.optimizers.trained import MSE, batches, layers, pipeline

BIN = Path(sys.executable).parent

#: Trains until it is stopped; every rank writes when it has begun, and where it has left.
SCRIPT = """
import sys
import torch, torch.distributed as dist
import penstock as ps
from penstock.runtime import Pipeline

torch.set_num_threads(1)
dist.init_process_group("gloo")
schedule = ps.build("1F1B", ranks=2, microbatches=2)
stages = {stage: torch.nn.Linear(4, 4) for stage in schedule.placement.stages_of(dist.get_rank())}
with (
    Pipeline(stages, schedule, loss_fn=torch.nn.functional.mse_loss) as pipe,
    ps.stop_on_signal(pipe) as stop,
):
    for step in range(1, 1_000_000):
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        if step == 3:
            sys.stdout.write("training\\n")
            sys.stdout.flush()
        if stop.requested():
            break
sys.stdout.write(f"left after {step}: {stop.reason}\\n")
dist.destroy_process_group()
"""


def loop(pipe, stop, ask, steps=40):
    """Train; returns after which step, and how many steps passed after ``ask``, if it asked, had done so."""
    (x, y), *_ = batches(1)
    for step in range(1, steps + 1):
        pipe.step(x, target=y)
        ask(step, stop)
        if stop.requested():
            return step, stop.reason
    return None


@pytest.mark.parametrize("asking", [0, 1, 3])
def test_all_ranks_leave_after_the_same_step(asking):
    def train(transport):
        def ask(step, stop):
            if step == 4 and transport.rank == asking:
                stop.request()

        with pipeline(layers(), transport, "1F1B") as pipe, ps.stop_on_signal(pipe, signals=()) as stop:
            left = loop(pipe, stop, ask)
            assert stop.requested()  # for the rest of the block
            return left

    found = run_in_threads(train, 4)
    assert found == [found[0]] * 4
    step, reason = found[0]
    assert reason == f"rank {asking} requested it"
    assert 5 <= step <= 4 + 17  # the ranks agree in one of 16 calls or more, and act on it in the next one


def test_ranks_that_no_data_connects_agree_as_well():
    """In an evaluation the first rank can be far ahead."""

    def evaluate(transport):
        (x, _), *_ = batches(1)
        with pipeline(layers(), transport, "1F1B") as pipe, ps.stop_on_signal(pipe, signals=()) as stop:
            for step in range(1000):
                pipe.eval(x)
                if transport.rank == 3 and step == 5:
                    stop.request()
                if stop.requested():
                    return step
        return None

    found = run_in_threads(evaluate, 4)
    assert found[0] is not None
    assert len(set(found)) == 1


def test_a_failure_ends_the_wait_for_another_rank():
    def train(transport):
        with pipeline(layers(), transport, "1F1B") as pipe, ps.stop_on_signal(pipe, signals=()) as stop:
            for _ in range(3):
                if transport.rank == 1:
                    raise ZeroDivisionError("here")
                stop.requested()

    with pytest.raises(ZeroDivisionError):
        run_in_threads(train, 2)


def test_ranks_of_one_pipeline_that_call_it_less_often_are_named():
    def train(transport):
        with pipeline(layers(), transport, "1F1B") as pipe, ps.stop_on_signal(pipe, signals=()) as stop:
            for _ in range(3 * (1 - transport.rank)):
                stop.requested()

    with pytest.raises(StepError, match=r"rank 0 waits in Stop\.requested\(\) for rank 1, which has finished"):
        run_in_threads(train, 2)


@pytest.fixture
def alone():
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    with Pipeline({0: torch.nn.Linear(4, 4)}, schedule, loss_fn=MSE) as pipe:
        yield pipe


def test_a_signal_ends_the_loop_and_handlers_are_restored(alone):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for number in (signal.SIGTERM, signal.SIGINT):
        with ps.stop_on_signal(alone) as stop:
            assert (stop.requested(), stop.reason) == (False, None)
            signal.raise_signal(number)
            assert (stop.requested(), stop.reason) == (True, f"rank 0 received {number.name}")
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_interrupt_is_one_and_a_second_sigterm_is_not(alone):
    with ps.stop_on_signal(alone) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested()


def test_a_signal_that_is_ignored_stays_so(alone, monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ps.stop_on_signal(alone) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert not stop.requested()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_the_main_thread_can_handle_signals():
    def train(transport):
        with pipeline(layers(), transport) as pipe:
            ps.stop_on_signal(pipe)

    with pytest.raises(StageError, match=r"only the main thread .* pass signals=\(\)"):
        run_in_threads(train, 2)


# Processes ----------------------------------------------------------------------------------------------------------


def two_pipelines(rank, _ranks, asking):
    """Two pipelines of two ranks, e.g. replicas: a signal to one process stops all four."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    schedule = ps.build("1F1B", ranks=2, microbatches=4)
    split = layers(2)

    def ask(step, _):
        if step == 4 and rank == asking:
            os.kill(os.getpid(), signal.SIGTERM)

    pipe = Pipeline({rank % 2: split[rank % 2]}, schedule, loss_fn=MSE, group=groups[rank // 2])
    with pipe, ps.stop_on_signal(pipe) as stop:
        assert loop(pipe, stop, lambda *_: None, steps=3) is None
        return loop(pipe, stop, ask)


def test_a_signal_to_one_process_stops_all_pipelines(workers):
    found = workers.run(two_pipelines, 3, ranks=4, fresh=True)
    assert found == [found[0]] * 4
    assert found[0][1] == "rank 3 received SIGTERM"


@pytest.mark.processes
def test_sigterm_to_torchrun_ends_all_ranks_after_the_same_step(tmp_path):
    """For ``penstock run``, see tests/test_training_example.py."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        assert [started.stdout.readline() for _ in range(2)] == ["training\n"] * 2
        started.send_signal(signal.SIGTERM)
        output, errors = started.communicate(timeout=60)
    lines = output.splitlines()
    assert len(lines) == 2, (output, errors)
    assert lines[0] == lines[1]
    assert lines[0].endswith("received SIGTERM")


@pytest.mark.processes
def test_ranks_that_take_too_long_are_killed(tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text(
        "import signal, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
        "sys.stdout.write('up\\n')\nsys.stdout.flush()\ntime.sleep(300)"
    )
    command = [str(BIN / "penstock"), "run", "--ranks", "2", "--grace", "0.2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        for _ in range(2):
            started.stdout.readline()
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 143
