"""A small model in stages, with what its pipelines and optimizers need, and what the unsplit model makes of it."""

from __future__ import annotations

import math

import torch
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline

WIDTH = 4
MSE = nn.functional.mse_loss


class Layer(nn.Module):
    """A layer with a norm, named as in any model; `spoils` makes its gradients infinite when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.spoils = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.tanh(self.linear(x)))
        return Spoiled.apply(y) if self.spoils else y


class Spoiled(torch.autograd.Function):
    """Passes on its input, and an infinite gradient."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * math.inf


def layers(number: int = 4, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*[Layer() for _ in range(number)]).to(dtype)


def batches(number: int, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (
            torch.randn(8, WIDTH, generator=generator, dtype=dtype),
            torch.randn(8, WIDTH, generator=generator, dtype=dtype),
        )
        for _ in range(number)
    ]


def pipeline(split: nn.Sequential, transport, name: str = "ZBVZeroBubble", **options) -> Pipeline:
    schedule = ps.build(name, ranks=transport.ranks, microbatches=4)
    stages = {stage: split[stage] for stage in schedule.placement.stages_of(transport.rank)}
    return Pipeline(stages, schedule, loss_fn=MSE, transport=transport, **options)
