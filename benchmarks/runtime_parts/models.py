"""Defines the models: one linear layer per stage, where only the runtime costs time, and transformer blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


class Block(nn.Module):
    """A transformer block: attention and a perceptron four times as wide, each with a norm and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(2, width // 32)
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        rows, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm(x))))


@dataclass(frozen=True)
class Model:
    """The model and the batch that all contestants train, with the same weights."""

    name: str
    stage: Callable[[int, int], nn.Module]
    microbatch: tuple[int, ...]

    def modules(self, stages: int, mine: list[int]) -> dict[int, nn.Module]:
        """Build the stages of one rank. A stage always has the same weights."""
        made = {}
        for index in mine:
            torch.manual_seed(1000 + index)
            made[index] = self.stage(index, stages)
        return made

    def batch(self, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input and target of a step; the first dimension is that of the microbatches."""
        torch.manual_seed(7)
        rows, *rest = self.microbatch
        return torch.randn(rows * microbatches, *rest), torch.randn(rows * microbatches, *rest)


def linear(width: int = 8, rows: int = 2) -> Model:
    """Return the model with one linear layer per stage."""
    return Model(f"Linear({width}, {width})", lambda _index, _stages: nn.Linear(width, width), (rows, width))


def transformer(layers: int, width: int, rows: int, length: int) -> Model:
    """Return the model with transformer blocks, distributed evenly over the stages."""

    def stage(index: int, stages: int) -> nn.Module:
        first, after = index * layers // stages, (index + 1) * layers // stages
        return nn.Sequential(*(Block(width) for _ in range(first, after)))

    return Model(f"{layers} blocks of width {width}", stage, (rows, length, width))


def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of squares. Torch's fused loss returns a scalar that keeps the storage of all the squares."""
    return functional.mse_loss(output, target, reduction="none").mean()
