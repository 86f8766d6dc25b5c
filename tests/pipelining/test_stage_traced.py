"""Stages of a traced model, with a graph that torch has traced: gradients are those of the whole model."""

import copy
import warnings

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn
from torch.distributed.pipelining import pipe_split, pipeline

from penstock.pipelining._utils import PipeInfo, PipeliningMetadataError
from penstock.pipelining.stage import _PipelineStage, build_stage
from pipelining.contracts import fake_group

CPU = torch.device("cpu")
WIDTH = 4
MICROBATCHES = 4


class Traced(nn.Module):
    """Two tensors go from one stage to the next."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        y = x * 2
        pipe_split()
        return torch.tanh(self.second(x)) + y


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def traced():
    torch.manual_seed(1)
    model = Traced()
    whole = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of another part of it
        return whole, pipeline(model, mb_args=(numbers(0, 2, WIDTH),))


def train(rank, ranks, name, *, group):
    whole, pipe = traced()
    x, target = numbers(1, 2 * MICROBATCHES, WIDTH), numbers(2, 2 * MICROBATCHES, WIDTH)
    output = whole(x)
    nn.functional.mse_loss(output, target).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    stage = build_stage(pipe.get_stage_module(rank), rank, pipe.info(), CPU, group)
    assert isinstance(stage, _PipelineStage)
    kind = torch_schedules.get_schedule_class(name)
    schedule = kind(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        stage.submod.zero_grad()
        found = schedule.step(x) if rank == 0 else schedule.step(target=target)
        if rank == 1:
            torch.testing.assert_close(found, output)
        names = [name for name, parameter in stage.submod.named_parameters() if parameter.grad is not None]
        assert names
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_gradients_are_those_of_the_whole_model(workers, name):
    workers.run(train, name, ranks=2)


def test_what_a_graph_must_have():
    _, pipe = traced()
    with fake_group(0, 2):
        stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), CPU)
        assert stage.get_stage_index_of_submod("submod_pp_1") == 1
        with pytest.raises(PipeliningMetadataError, match="submod_7"):
            stage.get_stage_index_of_submod("submod_7")
        with pytest.raises(PipeliningMetadataError, match="3 stages"):
            build_stage(pipe.get_stage_module(0), 0, PipeInfo(pipe.info().graph, 3, False), CPU)
        with pytest.raises(AssertionError):
            stage._prepare_forward_infra(1, None)
        with pytest.raises(PipeliningMetadataError):
            stage._prepare_backward_infra(1)
