"""Processes that are killed while they save lose nothing but what they were saving."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.runtime import Pipeline

pytestmark = pytest.mark.processes
WIDTH = 500


class Layer(nn.Module):
    """A layer with a name of its own."""

    def __init__(self, stage):
        super().__init__()
        self.name = f"layer{stage}"
        self.add_module(self.name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return getattr(self, self.name)(x)


def pipeline(schedule, rank, **options):
    stages = {stage: Layer(stage) for stage in schedule.placement.stages_of(rank)}
    pipe = Pipeline(stages, schedule, loss_fn=mse_loss, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), momentum=0.9)
    for parameter in pipe.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return pipe, optimizer


def save_until_killed(rank, ranks, folder, *, group):
    """Save again and again, in turn waiting and in the background: all values of a checkpoint are its step."""
    schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=2, stages_per_rank=2)
    pipe, optimizer = pipeline(schedule, rank, group=group)
    step = ps.load(pipe, folder, optimizer=optimizer)
    assert held_values(pipe, optimizer) == ({float(step)} if step else held_values(pipe, optimizer))
    while True:
        step += 1
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.fill_(step)
                optimizer.state[parameter]["momentum_buffer"].fill_(step)
        ps.save(pipe, folder, step=step, optimizer=optimizer, keep=2, wait=step % 2 == 0)


def held_values(pipe, optimizer):
    tensors = [*pipe.parameters(), *(optimizer.state[one]["momentum_buffer"] for one in pipe.parameters())]
    return {value for tensor in tensors for value in tensor.unique().tolist()}


def kill_during_a_save(workers, folder, patience):
    """Kill all processes a moment after some save has begun."""
    begun = set(folder.iterdir())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (set(folder.glob(".step-*.part")) - begun):
        time.sleep(0.0005)
    time.sleep(patience)
    for process in workers.process_ids:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def check(folder):
    """Load what is there, on one rank; returns its step."""
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=4)
    pipe, optimizer = pipeline(schedule, 0)
    with pipe:
        step = ps.load(pipe, folder, optimizer=optimizer)
        if step:
            assert held_values(pipe, optimizer) == {float(step)}
        return step


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_killed_at_random_moments_of_saves(workers, kills, tmp_path):
    chance = random.Random(kills)
    steps, hits = [0], 0
    while hits < kills:
        killer = threading.Thread(target=kill_during_a_save, args=(workers, tmp_path, chance.uniform(0, 0.5)))
        workers.run(save_nothing, ranks=2)  # so that they are there
        killer.start()
        workers.run(save_until_killed, tmp_path, ranks=2, deaths=True)
        killer.join()
        hits += any(tmp_path.glob(".step-*"))
        steps.append(check(tmp_path))
        assert steps[-1] >= steps[-2]
        assert len([*tmp_path.glob("step-*")]) <= 3
    assert steps[-1] > 0


def save_nothing(rank, ranks):
    pass
