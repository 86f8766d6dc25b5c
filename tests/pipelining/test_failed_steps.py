"""What a failed step leaves behind: nothing that holds the group, whose end the other ranks wait for."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

pytestmark = pytest.mark.usefixtures("one_gloo_rank", "operations")


class Failing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ValueError("on request")
        y = self.layer(x)
        if self.where == "backward":
            y.register_hook(fail)
        return y


def fail(*_given: object) -> None:
    raise ValueError("on request")


def step(kind: type, where: str) -> weakref.ref[dist.ProcessGroup]:
    """Run a step that fails on a group of its own; return what knows whether the group is gone."""
    group = dist.new_group([0])
    stages = [
        PipelineStage(module, index, 2, torch.device("cpu"), group=group)
        for index, module in enumerate([nn.Linear(4, 4), Failing("")])
    ]
    schedule = kind(stages, 2, loss_fn=fail if where == "loss" else mse_loss)
    if where != "loss":
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        stages[1].submod.where = where
    with pytest.raises((RuntimeError, ValueError), match="on request"):
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    dist.destroy_process_group(group)
    return weakref.ref(group)


@pytest.mark.parametrize("kind", [ScheduleLoopedBFS, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_the_group_goes_without_the_garbage_collector(kind: type, where: str) -> None:
    gc.collect()
    gc.disable()
    try:
        assert step(kind, where)() is None
    finally:
        gc.enable()
