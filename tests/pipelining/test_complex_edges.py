"""Complex tensors between stages: their gradients are those of the unsplit model, whatever the microbatches' sizes."""

import pytest
import torch
from torch import nn

from penstock.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from penstock.pipelining.stage import _TensorMeta
from pipelining.contracts import CPU, WIDTH, fake_group, gradients, numbers, summed, unsplit

MICROBATCHES = 2


class ToComplex(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return torch.view_as_complex(self.linear(x).unflatten(-1, (WIDTH, 2)))


class Rotate(nn.Module):
    def __init__(self, *, trained):
        super().__init__()
        turns = torch.arange(WIDTH) * 1j
        self.turns = nn.Parameter(turns) if trained else turns

    def forward(self, x):
        return x * self.turns.exp()


class ToReal(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(torch.view_as_real(x).prod(-1))


def model(*, trained):
    torch.manual_seed(0)
    return nn.ModuleList([ToComplex(), Rotate(trained=trained), Rotate(trained=trained), ToReal()])


def assert_trains(model, stages, schedule_class, batch):
    """A step of these stages gives their parameters the gradients that they have in the unsplit model."""
    x, target = numbers(1, batch, WIDTH), numbers(2, batch, WIDTH)
    expected = unsplit(model, x, target)
    schedule = schedule_class(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
    for _ in range(2):
        model.zero_grad()
        args = (x,) if any(stage.is_first for stage in stages) else ()
        last = {"target": target} if any(stage.is_last for stage in stages) else {}
        schedule.step(*args, **last)
        found = gradients(model)
        for stage in stages:
            for name in found:
                if name.startswith(f"{stage.stage_index}."):
                    torch.testing.assert_close(found[name], expected.gradients[name])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("batch", [8, 7])
def test_stages_of_one_rank(batch, trained):
    with fake_group():
        parts = model(trained=trained)
        stages = [PipelineStage(module, index, len(parts), CPU) for index, module in enumerate(parts)]
        assert_trains(parts, stages, ScheduleInterleaved1F1B, batch)


def run_two_ranks(rank, ranks, group):
    torch.set_num_threads(1)
    for trained in (True, False):
        for batch in (8, 7):
            parts = model(trained=trained)
            stages = [PipelineStage(parts[index], index, 4, CPU, group=group) for index in (rank, 3 - rank)]
            assert_trains(parts, stages, ScheduleZBVZeroBubble, batch)


def test_stages_of_two_ranks(workers):
    workers.run(run_two_ranks, ranks=2)


def test_a_described_tensor_requires_a_gradient_if_its_type_can_have_one():
    for dtype, expected in ((torch.complex64, True), (torch.bfloat16, True), (torch.int64, False), (torch.bool, False)):
        described = _TensorMeta(torch.Size([2]), (1,), dtype, requires_grad=True)
        assert described.to_tensor(CPU).requires_grad is expected
