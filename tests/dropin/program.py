"""A program for torch.distributed.pipelining, as its users write them; it knows nothing of another package.

It trains on every rank, and says which package it used: in this process, in one it spawns, and in a new interpreter.
"""

import importlib
import multiprocessing
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec

MODULES = [
    "_IR",
    "_backward",
    "_debug",
    "_schedule_visualizer",
    "_unflatten",
    "_utils",
    "microbatch",
    "schedules",
    "stage",
]
NAME = "torch.distributed.pipelining"
CHILD = f"import {NAME}.schedules as s; print('interpreter', s.__name__)"


def say_package() -> None:
    """Say what the schedules are, in a spawned process."""
    print("spawned", importlib.import_module(f"{NAME}.schedules").__name__, flush=True)


def train(rank: int, ranks: int) -> None:
    """Train one stage per rank; the last one prints losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(ranks))
    stage = PipelineStage(model[rank], rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss, args_chunk_spec=(TensorChunkSpec(0),))
    optimizer = torch.optim.SGD(model[rank].parameters(), lr=0.5)
    x, target = torch.randn(16, 8), torch.rand(16, 8)
    for step in range(4):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), target=target, losses=losses)
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean():.6f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        print("schedules of", importlib.import_module(f"{NAME}.schedules").__name__, flush=True)
    if dist.get_rank() == 0 and "--children" in sys.argv:
        modules = [importlib.import_module(f"{NAME}.{name}") for name in MODULES]
        print("modules of", *sorted({module.__name__.rpartition(".")[0] for module in modules}), flush=True)
        spawned = multiprocessing.get_context("spawn").Process(target=say_package)
        spawned.start()
        spawned.join()
        subprocess.run([sys.executable, "-c", CHILD], check=True)
    dist.destroy_process_group()
