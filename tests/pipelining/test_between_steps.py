"""Stages that two schedules use, weights that are unfrozen between steps, and weights of several kinds or stages."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from penstock.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from penstock.pipelining._engine.mode_selection import Mode
from penstock.pipelining._schedule import base
from penstock.pipelining._utils import PipeliningMetadataError
from penstock.pipelining.schedules import _ScheduleForwardOnly
from pipelining.contracts import CPU, WIDTH, averaged, gradients, layers, numbers, unsplit

pytestmark = pytest.mark.usefixtures("one_rank")

MICROBATCHES = 4


def data(batch=8):
    return numbers(1, batch, WIDTH), numbers(2, batch, WIDTH)


def stages_of(model):
    return [PipelineStage(module, index, len(model), CPU) for index, module in enumerate(model)]


def assert_steps(model, expected, steps=1):
    """Gradients are those of so many steps of the unsplit model."""
    for name, gradient in gradients(model).items():
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(local, steps * expected.gradients[name])


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_schedules_that_share_stages_do_not_disturb_each_other(microbatches):
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target, averaged)
    stages = stages_of(model)
    training = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=averaged)
    other = ScheduleInterleaved1F1B(stages, microbatches)
    for _ in range(3):
        model.zero_grad()
        training.step(x, target=target)
        assert_steps(model, expected)
        with torch.no_grad():
            torch.testing.assert_close(other.step(x), expected.output)


def test_a_forward_only_schedule_leaves_the_stage_of_another_as_it_was():
    model, (x, target) = layers(1), data()
    expected = unsplit(model, x, target, averaged)
    stage = stages_of(model)[0]
    training, forwards = Schedule1F1B(stage, MICROBATCHES, loss_fn=averaged), _ScheduleForwardOnly(stage, 8)
    for _ in range(2):
        model.zero_grad()
        training.step(x, target=target)
        assert_steps(model, expected)
        torch.testing.assert_close(forwards.step(x), expected.output)


def test_a_stage_that_is_unfrozen_after_the_first_step_is_trained():
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target, averaged)
    model[0].requires_grad_(False)
    schedule = ScheduleInterleaved1F1B(stages_of(model), MICROBATCHES, loss_fn=averaged)
    schedule.step(x, target=target)
    model[0].requires_grad_(True)
    model.zero_grad()
    schedule.step(x, target=target)
    assert_steps(model, expected)


def test_a_stage_that_is_unfrozen_after_the_first_step_is_not_left_out_in_silence():
    """By methods, gradients go where they went in the first step."""
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target, averaged)
    model[0].requires_grad_(False)
    schedule = ScheduleInterleaved1F1B(stages_of(model), MICROBATCHES, loss_fn=averaged)
    schedule.step(x, target=target)
    model[0].requires_grad_(True)
    by_methods = mock.patch.object(base, "select_mode", return_value=Mode.METHODS)
    message = "stage 0 microbatch 0: output 0 now requires a gradient but did not"
    with by_methods, pytest.raises(PipeliningMetadataError, match=message):
        schedule.step(x, target=target)
    again = ScheduleInterleaved1F1B(stages_of(model), MICROBATCHES, loss_fn=averaged)
    model.zero_grad()
    again.step(x, target=target)
    assert_steps(model, expected)


@pytest.mark.parametrize("steps", [1, 2])
def test_weights_that_are_dtensors_and_others_have_their_gradients_divided(steps):
    model, (x, target) = nn.Sequential(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))), data()
    expected = unsplit(model, x, target, averaged)
    linear = model[0][1]
    mesh = init_device_mesh("cpu", (1,))
    for name, weight in list(linear.named_parameters()):
        setattr(linear, name, nn.Parameter(distribute_tensor(weight.data, mesh, [Replicate()])))
    linear.register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh, [Replicate()]),))
    linear.register_forward_hook(lambda *args: args[2].to_local())
    schedule = ScheduleGPipe(stages_of(model)[0], MICROBATCHES, loss_fn=averaged)
    for _ in range(steps):
        schedule.step(x, target=target)
    assert_steps(model, expected, steps)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("schedule_class", [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
def test_a_weight_of_two_stages_of_a_rank_has_its_gradient_divided_once(schedule_class, steps):
    model, (x, target) = layers(2), data()
    model[1] = nn.Sequential(nn.Tanh(), model[0])
    expected = unsplit(model, x, target, averaged)
    schedule = schedule_class(stages_of(model), MICROBATCHES, loss_fn=averaged)
    for _ in range(steps):
        schedule.step(x, target=target)
    assert_steps(model, expected, steps)


@pytest.mark.parametrize("schedule_class", [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
@pytest.mark.parametrize("refused", [1, MICROBATCHES])
def test_a_step_that_fails_leaves_the_gradients_of_earlier_steps(schedule_class, refused):
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target, averaged)
    failing, microbatches = False, 0

    def loss_fn(output, target):
        nonlocal microbatches
        microbatches += 1
        if failing and microbatches == refused:
            raise ArithmeticError
        # In the step that fails all gradients are zero, so that those of earlier steps are seen.
        return averaged(output, target) * (0 if failing else 1)

    schedule = schedule_class(stages_of(model), MICROBATCHES, loss_fn=loss_fn)
    schedule.step(x, target=target)
    failing, microbatches = True, 0
    with pytest.raises(ArithmeticError):
        schedule.step(x, target=target)
    assert_steps(model, expected)
    failing = False
    schedule.step(x, target=target)
    assert_steps(model, expected, 2)


@pytest.mark.parametrize("schedule_class", [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
def test_a_step_that_fails_leaves_no_gradients_in_sharded_stages(schedule_class):
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target, averaged)
    for module in model:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer, microbatches = torch.optim.SGD(model.parameters()), 0

    def loss_fn(output, target):
        nonlocal microbatches
        microbatches += 1
        if microbatches == MICROBATCHES:
            raise ArithmeticError
        return averaged(output, target)

    schedule = schedule_class(stages_of(model), MICROBATCHES, loss_fn=loss_fn)
    with pytest.raises(ArithmeticError):
        schedule.step(x, target=target)
    optimizer.zero_grad()
    schedule.step(x, target=target)
    assert_steps(model, expected)


def test_a_step_that_fails_while_stages_are_prepared_keeps_no_batch():
    model, (x, target) = layers(2), data()
    model[1] = nn.Linear(WIDTH + 1, WIDTH)
    stages = stages_of(model)
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=averaged)
    with pytest.raises(RuntimeError, match="shapes"):
        schedule.step(x, target=target)
    assert [one for owner in (schedule, *stages) for part in owner._next_microbatches for one in part] == []
