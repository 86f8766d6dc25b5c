"""``ps.ProgressLine``: what it shows, where, and how often."""

import io
import os
import termios

import pytest
import torch

import penstock as ps
from penstock.errors import StageError
from penstock.runtime import Pipeline, run_in_threads
from penstock.runtime.statistics import Statistics
from runtime.optimizers.trained import MSE, layers, pipeline


@pytest.fixture
def clock(monkeypatch):
    """The seconds of the line, which pass only where a test says so."""
    now = [100.0]
    monkeypatch.setattr("penstock.runtime.progress_line.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def pipe():
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    with Pipeline({0: torch.nn.Linear(4, 4)}, schedule, loss_fn=MSE) as pipe:
        yield pipe


@pytest.fixture
def terminal():
    """The file of a terminal, and the lines that it shows."""
    screen, keys = os.openpty()
    with os.fdopen(keys, "w") as file, os.fdopen(screen, newline="\n") as shown:
        yield file, shown


def count(pipe, seconds, waited):
    """Count a step as the engine does."""
    counter = pipe._engine.counter
    before = counter.total
    counter.total = Statistics(before.steps + 1, before.seconds + seconds, before.waited + waited)


def test_a_log_gets_a_line_every_so_often_and_the_last_one(pipe, clock):
    log = io.StringIO()
    with ps.ProgressLine(pipe, steps=100, every=10.0, file=log) as line:
        for step in range(1, 31):
            count(pipe, 0.8, 0.2)
            line.update(step, tokens=500, loss=torch.tensor(8.0 / step), rate=None)
            clock[0] += 1
    assert log.getvalue().splitlines() == [
        "step 1/100  loss 8",
        "step 11/100  loss 0.7273  500 tokens/s  eta 1:29  bubble 25%",
        "step 21/100  loss 0.381  500 tokens/s  eta 1:19  bubble 25%",
        "step 30/100  loss 0.2667  500 tokens/s  eta 1:10  bubble 25%",
    ]


def test_rates_are_those_of_the_last_half_minute(pipe, clock):
    log = io.StringIO()
    line = ps.ProgressLine(pipe, every=10.0, file=log)
    for step in range(1, 201):
        clock[0] += 1 if step < 100 else 4
        line.update(step)
    assert log.getvalue().splitlines()[2] == "step 21  1.0 s/step  bubble 0%"
    assert log.getvalue().splitlines()[-1].split("  ")[1] == "4.0 s/step"


def test_the_end_is_shown_once_and_a_loss_is_read_only_where_it_is_shown(pipe, clock):
    class Loss:
        def item(self):
            return reads.append(1) or 0.5

    log, reads = io.StringIO(), []
    with ps.ProgressLine(pipe, steps=5, file=log) as line:
        for step in range(1, 6):
            clock[0] += 1
            line.update(step, loss=Loss())
    assert log.getvalue().splitlines() == ["step 1/5  loss 0.5", "step 5/5  loss 0.5  1.0 s/step  bubble 0%"]
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "step 2/9  loss 2.5  1,000 tokens/s  eta 7s  bubble 0%"),
        (41, "step 2/9  loss 2.5  1,000 tokens/s"),
        (27, "step 2/9  loss 2.5  eta 7s"),
        (10, "step 2/9"),
        (6, "step"),
    ],
)
def test_a_terminal_has_one_line_that_fits(pipe, clock, terminal, columns, shown):
    file, screen = terminal
    termios.tcsetwinsize(file, (24, columns))
    with ps.ProgressLine(pipe, steps=9, file=file) as line:
        line.update(1, tokens=1000, loss=3.0)
        clock[0] += 0.05
        line.update(1, tokens=0, loss=2.75)  # too soon
        clock[0] += 0.95
        line.update(2, tokens=1000, loss=2.5)
    width = columns - 1
    drawn = [text.ljust(width)[:width] for text in ("step 1/9  loss 3", shown)]
    assert screen.readline().split("\r") == ["", *drawn, "\n"]


def test_only_the_last_stage_writes_unless_another_rank_is_chosen():
    def train(transport, **options):
        log = io.StringIO()
        with pipeline(layers(), transport, "1F1B", **options) as pipe, ps.ProgressLine(pipe, 1, file=log) as line:
            line.update(1)
        return log.getvalue()

    assert run_in_threads(train, 4) == ["", "", "", "step 1/1\n"]


def test_a_rank_that_does_not_exist(pipe):
    with pytest.raises(StageError, match=r"rank must be one of the 1 ranks of this pipeline \(0 to 0\), not 1"):
        ps.ProgressLine(pipe, rank=1)
