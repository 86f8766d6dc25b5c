"""Gradients of several steps without ``zero_grad``: a step adds to those of earlier ones, and changes nothing else."""

import pytest
import torch
from torch import nn

from penstock.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from pipelining.contracts import CPU, WIDTH, averaged, gradients, layers, numbers, unsplit

pytestmark = pytest.mark.usefixtures("one_rank")

SCHEDULES = [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble]


def stages_of(model):
    return [PipelineStage(module, index, len(model), CPU) for index, module in enumerate(model)]


class Scaled(nn.Module):
    """Multiplies by a weight, so that the gradient of the weight is the input."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("schedule_class", SCHEDULES)
def test_half_precision_gradients_of_eight_steps_stay_finite(schedule_class):
    """The largest number of a step is 32 * 2**14 / 16 = 2**15, that of all steps 2**13: both fit, 2**18 does not."""
    loss_scale, microbatches, steps = 2.0**14, 32, 8
    model = nn.ModuleList([Scaled(torch.float16), Scaled(torch.float16)])
    schedule = schedule_class(stages_of(model), microbatches, loss_fn=lambda output, _: output.mean() * loss_scale)
    x = torch.full((microbatches, 1), 1 / 16, dtype=torch.float16)
    largest = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: largest.append(weight.grad.abs().max().item()))
    for _ in range(steps):
        schedule.step(x, target=x)
    assert max(largest) == 2.0**15
    for parameter in model.parameters():
        assert parameter.grad.item() == steps * loss_scale / 16


@pytest.mark.parametrize("schedule_class", SCHEDULES)
def test_a_step_that_adds_nothing_changes_no_bit_of_earlier_gradients(schedule_class):
    model, microbatches = layers(2), 11
    x = numbers(1, 2 * microbatches, WIDTH)
    for seed, parameter in enumerate(model.parameters()):
        parameter.grad = numbers(seed, *parameter.shape)
    earlier = gradients(model)
    schedule = schedule_class(stages_of(model), microbatches, loss_fn=lambda output, _: output.sum() * 0)
    schedule.step(x, target=x)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, earlier[name]), name


def test_gradients_stay_in_the_memory_that_the_program_gave_them():
    model, x = layers(1), numbers(1, 8, WIDTH)
    expected = unsplit(model, x, x, averaged)
    sizes = [parameter.numel() for parameter in model.parameters()]
    memory = torch.ones(sum(sizes))
    held = []
    for parameter, part in zip(model.parameters(), memory.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
        held.append(parameter.grad)
    ScheduleGPipe(stages_of(model)[0], 4, loss_fn=averaged).step(x, target=x)
    assert all(parameter.grad is one for parameter, one in zip(model.parameters(), held, strict=True))
    torch.testing.assert_close(memory, 1 + torch.cat([gradient.flatten() for gradient in expected.gradients.values()]))


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_of_an_embedding(sparse):
    model = nn.ModuleList([nn.Embedding(6, WIDTH, sparse=sparse)])
    x, target = torch.arange(8) % 5, numbers(2, 8, WIDTH)
    expected = unsplit(model, x, target, averaged)
    schedule = ScheduleGPipe(stages_of(model)[0], 4, loss_fn=averaged)
    for _ in range(3):
        schedule.step(x, target=target)
    found = model[0].weight.grad
    assert found.is_sparse is sparse
    torch.testing.assert_close(found.to_dense(), 3 * expected.gradients["0.weight"].to_dense())


def test_a_gradient_that_is_a_lazy_conjugate_is_added_to():
    module = Scaled(torch.complex64)
    module.weight.grad = torch.tensor([1 + 2j]).conj()
    x = torch.full((4, 1), 3 + 4j)
    schedule = ScheduleGPipe(stages_of([module])[0], 2, loss_fn=lambda output, _: output.real.mean())
    schedule.step(x, target=x)
    assert module.weight.grad.item() == (1 - 2j) + (3 - 4j)


def test_a_hook_that_takes_gradients_away_leaves_those_of_earlier_steps():
    model, x, taken = layers(1), numbers(1, 8, WIDTH), []
    schedule = ScheduleGPipe(stages_of(model)[0], 4, loss_fn=averaged)
    schedule.step(x, target=x)
    earlier = gradients(model)

    def take(weight):
        taken.append(weight.grad)
        weight.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    schedule.step(x, target=x)
    assert len(taken) == 4 * len(earlier)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, earlier[name]), name
