"""Trains with several stages per rank, with any schedule that allows them, and evaluates from time to time.

    penstock run --ranks 2 examples/several_stages_per_rank.py
    torchrun --nproc-per-node 4 examples/several_stages_per_rank.py --schedule DualPipeV --microbatches 8

Only the imports below select the package: with ``torch.distributed.pipelining`` the losses are the same. (Its V-shaped
schedules cannot evaluate, so ``--evaluate`` is off by default.)
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from penstock.pipelining import PipelineStage
from penstock.pipelining.schedules import get_schedule_class

WIDTH, STAGES_PER_RANK = 32, 2
IN_A_V = ("ZBVZeroBubble", "DualPipeV")


class Block(nn.Module):
    """A residual block: a norm and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return x + self.narrow(functional.gelu(self.widen(self.norm(x))))


def stages_of(rank: int, ranks: int, schedule: str) -> list[int]:
    """Return the stages of a rank: down and up again in a V, otherwise in a loop."""
    if schedule in IN_A_V:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(STAGES_PER_RANK)]


def main() -> None:
    """Train for some steps; the rank of the last stage prints the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="Interleaved1F1B")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--evaluate", action="store_true")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = ranks * STAGES_PER_RANK
    torch.manual_seed(0)  # every rank builds the same model, and keeps only its stages
    model = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(total))
    mine = stages_of(rank, ranks, arguments.schedule)
    stages = [PipelineStage(model[index], index, total, torch.device("cpu")) for index in mine]
    kind = get_schedule_class(arguments.schedule)
    schedule = kind(stages, arguments.microbatches, loss_fn=nn.MSELoss())
    parameters = [parameter for index in mine for parameter in model[index].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)

    torch.manual_seed(1)
    x, target = torch.randn(8 * arguments.microbatches, WIDTH), torch.randn(8 * arguments.microbatches, WIDTH)
    inputs = (x,) if 0 in mine else ()
    wanted = {"target": target} if total - 1 in mine else {}
    for step in range(arguments.steps):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, losses=losses, return_outputs=False, **wanted)
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean():.6f}", flush=True)
        if arguments.evaluate and step % 4 == 3:
            losses = []
            schedule.eval(*inputs, losses=losses, **wanted)
            if losses:
                print(f"step {step} evaluated {torch.stack(losses).mean():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
