"""Our schedules drive torch's own stages, and torch's schedules drive ours: the boundary between them is torch's."""

import importlib
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from pipelining.contracts import CPU, OURS, UPSTREAM, WIDTH, averaged, gradients, layers, numbers, unsplit

MICROBATCHES = 8
STAGES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
          "DualPipeV": 2}  # fmt: skip


def mixed(rank, ranks, name, schedules_from, stages_from, deferred, *, group):
    """Train and evaluate by turns with schedules of one package and stages of another; what differs from one piece."""
    torch.set_num_threads(1)
    schedules = importlib.import_module(f"{schedules_from}.schedules")
    kind = importlib.import_module(f"{stages_from}.stage").PipelineStage
    count = ranks * STAGES[name]
    v = name in ("ZBVZeroBubble", "DualPipeV")
    mine = [rank] if count == ranks else [rank, count - 1 - rank if v else rank + ranks]
    model, x, target = layers(count), numbers(1, 16, WIDTH), numbers(2, 16, WIDTH)
    expected = unsplit(model, x, target, averaged)
    stages = [kind(model[index], index, count, CPU, group=group) for index in mine]
    made = schedules.get_schedule_class(name)
    options = {"defer_pp_recv": True} if deferred else {}
    schedule = made(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=averaged, **options)
    args = [x] if 0 in mine else []
    kwargs = {"target": target} if count - 1 in mine else {}
    for _ in range(2):
        model.zero_grad()
        with its_own_modes(schedules_from, stages_from):
            output = schedule.step(*args, **kwargs)
        for key, gradient in gradients(model).items():
            if int(key.split(".")[0]) in mine:
                torch.testing.assert_close(gradient, expected.gradients[key])
        if count - 1 in mine:
            torch.testing.assert_close(output, expected.output)
    return "right"


@contextmanager
def its_own_modes(schedules_from, stages_from):
    """Stages compare with the values of their own package, and torch's schedules ask for their own class."""
    modes = importlib.import_module(f"{stages_from}._utils").InferenceMode
    kind = importlib.import_module(f"{stages_from}.stage").PipelineStage
    ours = importlib.import_module("penstock.pipelining._schedule.preparation")
    theirs = importlib.import_module(f"{UPSTREAM}.schedules")
    with (
        mock.patch.object(ours, "InferenceMode", modes),
        mock.patch.object(theirs, "InferenceMode", modes),
        mock.patch.object(theirs, "PipelineStage", kind),
    ):
        yield


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("schedules_from", "stages_from"), [(OURS, UPSTREAM), (UPSTREAM, OURS), (OURS, OURS)])
def test_schedules_and_stages_of_two_packages(workers, name, schedules_from, stages_from):
    assert workers.run(mixed, name, schedules_from, stages_from, False, ranks=2) == ["right"] * 2


@pytest.mark.parametrize("name", ["Interleaved1F1B", "DualPipeV"])
def test_receives_that_are_posted_late(workers, name):
    assert workers.run(mixed, name, OURS, OURS, True, ranks=2) == ["right"] * 2


@pytest.mark.parametrize("name", STAGES)
def test_four_ranks(workers, name):
    assert workers.run(mixed, name, OURS, OURS, False) == ["right"] * 4


def unbalanced(rank, ranks, runtime, *, group):
    """Three stages on rank 0 and two on rank 1, in an order given as computations."""
    torch.set_num_threads(1)
    schedules = importlib.import_module(f"{OURS}.schedules")
    stage_module = importlib.import_module(f"{OURS}.stage")
    order = {
        1: "2F0 3F0 2F1 3F1 3B0 2I0 3I1 2B1 3W1 2W0",
        0: "0F0 1F0 0F1 1F1 4F0 4B0 4F1 4I1 1B0 0B0 4W1 1B1 0I1 0W1",
    }
    mine = [[0, 1, 4], [2, 3]][rank]
    model, x, target = layers(5), numbers(1, 4, WIDTH), numbers(2, 4, WIDTH)
    expected = unsplit(model, x, target, averaged)
    stages = [stage_module.PipelineStage(model[index], index, 5, CPU, group=group) for index in mine]
    kind = schedules._PipelineScheduleRuntime if runtime else schedules.PipelineScheduleMulti
    schedule = kind(stages, 2, loss_fn=averaged)
    schedule.pipeline_order = {
        each: [schedules._Action.from_str(a) for a in row.split()] for each, row in order.items()
    }
    if runtime:
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    else:
        schedule._validate_and_set_stage_mapping(schedule.pipeline_order)
    for turn in range(3):
        model.zero_grad()
        arguments = ([x], {"target": target}) if rank == 0 else ([], {})
        if turn == 1:
            output = schedule.eval(*arguments[0], **arguments[1])
        else:
            output = schedule.step(*arguments[0], **arguments[1])
            for key, gradient in gradients(model).items():
                if int(key.split(".")[0]) in mine:
                    torch.testing.assert_close(gradient, expected.gradients[key])
        if rank == 0:
            torch.testing.assert_close(output, expected.output)
    return "right"


@pytest.mark.parametrize("runtime", [False, True])
def test_ranks_with_different_numbers_of_stages(workers, runtime):
    assert workers.run(unbalanced, runtime, ranks=2) == ["right"] * 2
