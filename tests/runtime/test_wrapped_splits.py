"""Splits whose stages are wrapped for data parallelism: gradients of the unsplit model, and one export of all."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from models.families import build
from penstock.errors import StageError
from penstock.execution.distributed_tensors import is_distributed
from penstock.execution.parameter_names import plain_names
from penstock.execution.stage import Stage
from penstock.models.weights import WeightFiles
from penstock.runtime import Pipeline

pytestmark = pytest.mark.processes


@cache
def mesh():
    """Replicas by ranks of the pipeline; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def with_fsdp(module):
    replicas = mesh()["replica"]
    for block in module.transformer.h:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=replicas)
    return fully_shard(module, mesh=replicas)


def with_ddp(module):
    return DistributedDataParallel(module, process_group=mesh()["replica"].get_group())


WRAPPERS = {"fsdp": with_fsdp, "ddp": with_ddp}


def full(tensor):
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def train_and_export(rank, ranks, wrapper, name, folder):
    """Train a step on two replicas and export; returns the largest difference from the unsplit model's gradients."""
    torch.manual_seed(3)
    model = build("gpt2").double().eval()
    unsplit = copy.deepcopy(model)
    schedule = ps.build(name, ranks=2, microbatches=2)
    ids = torch.randint(3, 90, (8, 6))
    mine = ids.chunk(2)[mesh().get_local_rank("replica")]
    split = ps.split(model, stages=schedule.stages)
    with Pipeline(split, schedule, group=mesh().get_group("pipeline"), wrap=WRAPPERS[wrapper]) as pipe:
        pipe.step(input_ids=mine, labels=mine)
        for part in ids.chunk(4):
            (unsplit(input_ids=part, labels=part, use_cache=False).loss / 4).backward()
        expected = {name: one.grad for name, one in unsplit.named_parameters(remove_duplicate=False)}
        gaps = [
            float((full(one.grad) - expected[name]).abs().max())
            for stage in pipe.stages.values()
            for one, name in plain_names(stage.module).items()
        ]
        ps.export(pipe, folder)
    return max(gaps), len(gaps)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_replicas_train_alike_and_one_of_them_writes(workers, wrapper, name, tmp_path):
    for gap, count in workers.run(train_and_export, wrapper, name, tmp_path):
        assert count >= 3
        assert gap < 1e-12
    torch.manual_seed(3)
    expected = build("gpt2").double().state_dict()
    found = WeightFiles(tmp_path)
    assert len(found) == len(expected) - 1  # the head is the embedding
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert len([*tmp_path.glob("*.safetensors")]) == 2


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which the compiler reads
@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), Residual])
def test_stages_can_be_compiled(make):
    model = make()
    x, target = torch.ones(4, 3), torch.zeros(4, 3)
    nn.functional.mse_loss(model(x), target).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=2)
    with Pipeline(
        ps.split(model, stages=2, example=x[:1]),
        schedule,
        loss_fn=nn.functional.mse_loss,
        wrap=lambda module: torch.compile(module, backend="eager"),
    ) as pipe:
        pipe.step(x, target=target)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient)


def test_a_wrapper_that_returns_nothing():
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    with pytest.raises(StageError, match="wrap= must return a module, not None"):
        Pipeline({0: nn.Linear(2, 2)}, schedule, loss_fn=nn.functional.mse_loss, wrap=lambda module: None)
    with pytest.raises(StageError, match="wrap= takes modules by stage index"):
        Pipeline([Stage(0, nn.Linear(2, 2))], schedule, loss_fn=nn.functional.mse_loss, wrap=torch.compile)
