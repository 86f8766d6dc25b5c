"""Trains with a schedule of your own, from a CSV file: a row per rank, a cell per step.

    penstock check examples/schedule.csv --lower
    penstock run --ranks 2 examples/schedule_from_csv.py
    torchrun --nproc-per-node 2 examples/schedule_from_csv.py examples/schedule.csv

The file here places four stages in a V on two ranks, and lets the second microbatch overtake the backward of the first.
Write yours in a spreadsheet, or on paper first. `Pipeline` verifies it before anything is sent.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline

dist.init_process_group("gloo")
schedule = ps.read(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("schedule.csv"))
if dist.get_rank() == 0:
    print(schedule.grid())
    print(f"bubble of {ps.simulate(schedule, ps.Costs()).bubble_rate:.0%} if all actions take the same time")

torch.manual_seed(0)  # every rank builds the same model, and keeps only its stages
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(schedule.stages)))
split = ps.split(model, stages=schedule.stages)
x, target = torch.randn(8 * schedule.microbatches, 16), torch.rand(8 * schedule.microbatches, 16)
with Pipeline(split, schedule, loss_fn=nn.functional.mse_loss) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(8):
        pipe.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.loss is not None:  # on the rank of the last stage
            print(f"step {step} loss {pipe.loss:.6f}")
dist.destroy_process_group()
