"""A small GPT in plain torch, as a list of layers that can be cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

#: Every byte is a token.
TOKENS = 256
CONTEXT = 64
WIDTH = 128
HEADS = 4


class Embedding(nn.Module):
    """Embeds bytes and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes to vectors."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.add(self.token(tokens), self.position(positions))


class Block(nn.Module):
    """Causal attention, then an MLP of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH)
        with torch.no_grad():  # a block adds little at first
            self.attention_out.weight *= 0.2
            self.mlp_out.weight *= 0.2

    def forward(self, value: Tensor) -> Tensor:
        """Add both to the input."""
        value = value + self._attention(self.attention_norm(value))
        hidden: Tensor = self.mlp_out(gelu(self.mlp_in(self.mlp_norm(value))))
        return value + hidden

    def _attention(self, value: Tensor) -> Tensor:
        batch, length, _ = value.shape
        parts = self.attention_in(value).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, content = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, content, is_causal=True)
        out: Tensor = self.attention_out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class Head(nn.Module):
    """Scores how likely each byte is to come next."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, TOKENS)

    def forward(self, value: Tensor) -> Tensor:
        """Map vectors to scores."""
        scores: Tensor = self.scores(self.norm(value))
        return scores


def build_layers(blocks: int, seed: int = 0) -> list[nn.Module]:
    """Build the layers of the model, with the same weights on every rank."""
    torch.manual_seed(seed)
    return [Embedding(), *(Block() for _ in range(blocks)), Head()]


def assign_layers(blocks: int, stages: int) -> list[range]:
    """Choose the layers of each stage: blocks split as evenly as possible, the embedding first and the head last.

    >>> assign_layers(8, 4)
    [range(0, 3), range(3, 5), range(5, 7), range(7, 10)]
    """
    bounds = [1 + stage * blocks // stages for stage in range(stages + 1)]
    bounds[0], bounds[-1] = 0, blocks + 2
    return [range(begin, end) for begin, end in pairwise(bounds)]


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of the next byte."""
    return cross_entropy(scores.flatten(0, 1), target.flatten())
