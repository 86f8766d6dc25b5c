"""The models that are trained: a linear layer a stage, where only the runtime costs; and transformer blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


class Block(nn.Module):
    """A transformer block: attention and a perceptron four times as wide, each behind a norm and beside a shortcut."""

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
        """The same shape comes out."""
        rows, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm(x))))


@dataclass(frozen=True)
class Model:
    """What all contestants train: the same weights, the same batch."""

    name: str
    stage: Callable[[int, int], nn.Module]
    microbatch: tuple[int, ...]

    def modules(self, stages: int, mine: list[int]) -> dict[int, nn.Module]:
        """The stages of one rank. A stage has the same weights wherever and whenever it is made."""
        made = {}
        for index in mine:
            torch.manual_seed(1000 + index)
            made[index] = self.stage(index, stages)
        return made

    def batch(self, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target of a step; the first dimension is that of the microbatches."""
        torch.manual_seed(7)
        rows, *rest = self.microbatch
        return torch.randn(rows * microbatches, *rest), torch.randn(rows * microbatches, *rest)


def linear(width: int = 8, rows: int = 2) -> Model:
    """A linear layer a stage."""
    return Model(f"Linear({width}, {width})", lambda _index, _stages: nn.Linear(width, width), (rows, width))


def transformer(layers: int, width: int, rows: int, length: int) -> Model:
    """Transformer blocks, evenly over the stages."""

    def stage(index: int, stages: int) -> nn.Module:
        first, after = index * layers // stages, (index + 1) * layers // stages
        return nn.Sequential(*(Block(width) for _ in range(first, after)))

    return Model(f"{layers} blocks of width {width}", stage, (rows, length, width))


def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean of squares. That of torch in one go leaves a scalar with the storage of all the squares behind it."""
    return functional.mse_loss(output, target, reduction="none").mean()
