"""Trains a model that is split by tracing: cuts are named, and need not be at the borders of a Sequential.

    penstock run --ranks 2 examples/traced.py
    torchrun --nproc-per-node 2 examples/traced.py

`pipeline` exports the model with torch.export and cuts its graph. The residual connection around both layers of a block
is an edge of that graph, so a cut may fall inside a block.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.pipelining import SplitPoint, pipeline
from penstock.runtime import Pipeline

MICROBATCHES, SIZE, WIDTH = 4, 8, 16


class Block(nn.Module):
    """Two layers with a residual connection around them."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return x + self.narrow(torch.tanh(self.widen(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank builds the same model, and keeps only its stages
model = nn.Sequential(*(Block() for _ in range(3)))
x, target = torch.randn(MICROBATCHES * SIZE, WIDTH), torch.randn(MICROBATCHES * SIZE, WIDTH)

cuts = {"1": SplitPoint.BEGINNING, "1.narrow": SplitPoint.BEGINNING, "2": SplitPoint.BEGINNING}
traced = pipeline(model, mb_args=(x[:SIZE],), split_spec=cuts)
schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=MICROBATCHES)  # two stages on each rank
with Pipeline(traced, schedule, loss_fn=nn.functional.mse_loss) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(8):
        pipe.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.loss is not None:  # on the rank of the last stage
            print(f"step {step} loss {pipe.loss:.6f}")
dist.destroy_process_group()
