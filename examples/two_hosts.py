"""Trains on two hosts, started by torchrun on each.

    host 0$ torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST0 --master-port 29500 two_hosts.py
    host 1$ torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr HOST0 --master-port 29500 two_hosts.py

The program is that of a single host: `penstock run --ranks 4 examples/two_hosts.py` prints the same losses. Ranks are
numbered host by host, so under 1F1B only one pair of neighbouring stages communicates over the network.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="1F1B")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank may wait for another")
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank builds the same model, and keeps only its stages
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
schedule = ps.build(arguments.schedule, ranks=dist.get_world_size(), microbatches=8)
split = ps.split(model, stages=schedule.stages)

# An error in this block, or the loss of a host, is an error on every rank.
with Pipeline(split, schedule, loss_fn=nn.functional.mse_loss, timeout=arguments.timeout) as pipe:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    batch, target = torch.randn(64, 32), torch.rand(64, 32)
    for step in range(arguments.steps):
        pipe.step(batch, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.loss is not None:  # on the rank of the last stage
            print(f"step {step} loss {pipe.loss:.6f}", flush=True)
dist.destroy_process_group()
