"""What docs/architecture.md says of a step: how many frames there are from ``step`` to ``send``."""

import sys

import torch
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline, run_in_threads

WIDTH, MICROBATCHES = 4, 4


def frames_up_to(name):
    """The functions from the outermost one of this name down to the caller's caller."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    outermost = len(found) - 1 - found[::-1].index(name)
    return found[outermost::-1]


def spied(send, seen):
    def spy(*args):
        seen.append(frames_up_to("step"))
        return send(*args)

    return spy


def test_the_runtime_sends_four_frames_below_step():
    seen = []

    def train(transport):
        transport.send = spied(transport.send, seen)
        with Pipeline(
            {transport.rank: nn.Linear(WIDTH, WIDTH)}, schedule, loss_fn=loss_fn, transport=transport
        ) as pipe:
            pipe.step(torch.ones(8, WIDTH), target=torch.ones(8, WIDTH))

    def loss_fn(output, target):
        return (output - target).square().mean()

    schedule = ps.build("1F1B", ranks=2, microbatches=MICROBATCHES)
    run_in_threads(train, 2)
    assert len(seen) == 2 * MICROBATCHES
    for frames in seen:
        assert frames[:2] == ["step", "run"]
        assert len(frames) + 1 == 4, frames  # and send itself


def drop_in_frames(rank, ranks, name, *, group):
    from penstock.pipelining import PipelineStage, schedules
    from penstock.pipelining._stage.group_channel import GroupChannel

    seen = []
    original = GroupChannel.send
    GroupChannel.send = spied(original, seen)
    try:
        stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), rank, ranks, torch.device("cpu"), group=group)]
        kind = schedules.get_schedule_class(name)
        multi = issubclass(kind, schedules.PipelineScheduleMulti)
        schedule = kind(stages if multi else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        args = [torch.ones(8, WIDTH)] if rank == 0 else []
        kwargs = {"target": torch.ones(8, WIDTH)} if rank == ranks - 1 else {}
        schedule.step(*args, **kwargs)
    finally:
        GroupChannel.send = original
    return seen


def test_the_drop_in_sends_six_frames_below_step(workers):
    for name in ("GPipe", "1F1B", "Interleaved1F1B"):
        for seen in workers.run(drop_in_frames, name, ranks=2):
            assert len(seen) == MICROBATCHES
            for frames in seen:
                assert frames[:4] == ["step", "_step_microbatches", "_run_step", "run"]
                assert len(frames) + 1 == 6, frames  # and send itself
