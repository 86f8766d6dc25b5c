"""Trains with FSDP2 and a pipeline: pipelines side by side on other samples, each stage sharded over them.

    penstock run --ranks 4 examples/fsdp_and_pipeline.py
    torchrun --nproc-per-node 4 examples/fsdp_and_pipeline.py

Four ranks are two pipelines of two ranks. A stage gathers its parameters where the schedule says UNSHARD, and reduces
its gradients once per step. One pipeline of two ranks prints the same losses: `penstock run --ranks 2 ...`
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock as ps
from penstock.runtime import Pipeline

STAGES, MICROBATCHES, WIDTH = 2, 4, 32

dist.init_process_group("gloo")
replicas = dist.get_world_size() // STAGES
mesh = init_device_mesh("cpu", (replicas, STAGES), mesh_dim_names=("shard", "pipeline"))
replica = mesh.get_local_rank("shard")


def shard(stage: nn.Module) -> nn.Module:
    """Shard a stage over the pipelines, layer by layer."""
    for layer in stage.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    return fully_shard(stage, mesh=mesh["shard"])


torch.manual_seed(0)  # every rank builds the same model, and keeps its shard of its stage
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
x, target = torch.randn(32, WIDTH), torch.rand(32, WIDTH)
mine = slice(replica, None, replicas)  # the samples of this pipeline

schedule = ps.build("1F1B", ranks=STAGES, microbatches=MICROBATCHES)
split = ps.split(model, stages=STAGES)
group = mesh.get_group("pipeline")
with Pipeline(split, schedule, loss_fn=nn.functional.mse_loss, group=group, wrap=shard) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(8):
        pipe.step(x[mine], target=target[mine])
        optimizer.step()
        optimizer.zero_grad()
        if pipe.loss is not None:  # on the ranks of the last stage
            loss = torch.as_tensor(pipe.loss)
            dist.all_reduce(loss, group=mesh.get_group("shard"))
            if replica == 0:
                print(f"step {step} loss {loss / replicas:.6f}")
dist.destroy_process_group()
