"""What loss functions return, and what becomes of losses that a program keeps."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

pytestmark = pytest.mark.usefixtures("one_gloo_rank", "operations")
KINDS = [ScheduleGPipe, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble]


def step(kind: type, loss_fn, *, count: int = 2) -> list[nn.Module]:
    modules = [nn.Linear(4, 4) for _ in range(1 if kind is ScheduleGPipe else count)]
    stages = [PipelineStage(module, index, len(modules), torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = kind(stages[0] if kind is ScheduleGPipe else stages, 2, loss_fn=loss_fn)
    schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=[])
    return modules


@pytest.mark.parametrize("kind", [ScheduleGPipe, ScheduleLoopedBFS])
def test_a_loss_of_several_numbers_is_refused_where_it_is(kind):
    with pytest.raises(
        RuntimeError,
        match=r"\[Stage \d\] Failed to run stage backward: RuntimeError: the loss must be one number, not a tensor of "
        r"shape \(2, 4\)\nStage output: .*\nOutput gradient: None\nInput: ",
    ):
        step(kind, lambda output, target: mse_loss(output, target, reduction="none"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_kept_keeps_no_graph(kind):
    kept = []

    def loss_fn(output, target):
        kept.append(mse_loss(output, target))
        return kept[-1]

    modules = step(kind, loss_fn)
    assert [loss.grad_fn for loss in kept] == [None, None]
    assert all(module.weight.grad is not None for module in modules)
    weights = [weakref.ref(module.weight) for module in modules]
    del modules
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_that_is_kept_as_a_loss(kind):
    """It cannot be detached in place."""
    kept = []

    def loss_fn(output, target):
        kept.append(mse_loss(output, target).view(1))
        return kept[-1]

    modules = step(kind, loss_fn)
    assert all(module.weight.grad is not None for module in modules)
