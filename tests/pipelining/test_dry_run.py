"""The dry run that finds shapes changes nothing that the user can see."""

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.pipelining import PipelineStage, ScheduleGPipe, ScheduleLoopedBFS
from runtime.test_dry_run import Adding, Drawing, Masked

pytestmark = pytest.mark.usefixtures("one_gloo_rank")


def step(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor, kind: type = ScheduleLoopedBFS, **kwargs: Any):
    stages = [PipelineStage(module, index, len(modules), torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = kind(stages[0] if kind is ScheduleGPipe else stages, 2, loss_fn=mse_loss)
    schedule.step(x, target=y, **kwargs)


@pytest.mark.parametrize("place", [0, 1])
def test_a_buffer_that_is_expanded(place: int) -> None:
    modules: list[Any] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    modules[place] = Masked()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    whole = nn.Sequential(*modules)
    expected = torch.autograd.grad(mse_loss(torch.cat([whole(half) for half in x.split(2)]), y), [*whole.parameters()])
    step(modules, x, y)
    for parameter, gradient in zip(whole.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert modules[place].mask.stride() == (0, 1)


def test_random_numbers_of_python_and_of_modules() -> None:
    first, last = Drawing(), Drawing()
    random.seed(5)
    step([first, last], torch.ones(4, 4), torch.zeros(4, 4))
    generator = torch.Generator().manual_seed(0)
    assert first.seen[0::2][-2:] == [torch.rand(1, generator=generator).item() for _ in range(2)]
    chance = random.Random(5)
    drawn = [chance.random() for _ in range(4)]
    assert [*first.seen[1::2][-2:], *last.seen[1::2][-2:]] == drawn


@pytest.mark.filterwarnings("ignore:microbatches have 2, 1 samples")
@pytest.mark.parametrize("kind", [ScheduleGPipe, ScheduleLoopedBFS])
@pytest.mark.parametrize("rows", [4, 3])
def test_arguments_that_are_changed_in_place(kind: type, rows: int) -> None:
    x, bias = torch.zeros(rows, 4), torch.zeros(2, 4)
    step([Adding()], x, torch.zeros(rows, 4), kind, more={"bias": bias})
    assert x.tolist() == torch.ones(rows, 4).tolist()
    assert bias.tolist() == torch.ones(2, 4).tolist()
