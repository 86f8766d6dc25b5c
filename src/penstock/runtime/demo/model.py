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
    """What a byte is, and where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """From bytes to vectors."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.add(self.token(tokens), self.place(places))


class Block(nn.Module):
    """Attention to what came before, and a network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.network_norm = nn.LayerNorm(WIDTH)
        self.network_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.network_out = nn.Linear(4 * WIDTH, WIDTH)
        with torch.no_grad():  # a block begins with little to add
            self.attention_out.weight *= 0.2
            self.network_out.weight *= 0.2

    def forward(self, value: Tensor) -> Tensor:
        """Both, added to what comes in."""
        value = value + self._attention(self.attention_norm(value))
        hidden: Tensor = self.network_out(gelu(self.network_in(self.network_norm(value))))
        return value + hidden

    def _attention(self, value: Tensor) -> Tensor:
        batch, length, _ = value.shape
        parts = self.attention_in(value).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, content = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, content, is_causal=True)
        out: Tensor = self.attention_out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class Head(nn.Module):
    """How likely each byte is to come next."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, TOKENS)

    def forward(self, value: Tensor) -> Tensor:
        """From vectors to scores."""
        scores: Tensor = self.scores(self.norm(value))
        return scores


def layers(blocks: int, seed: int = 0) -> list[nn.Module]:
    """The layers of the model, with the same weights on every rank."""
    torch.manual_seed(seed)
    return [Embedding(), *(Block() for _ in range(blocks)), Head()]


def cut(blocks: int, stages: int) -> list[range]:
    """The layers of each stage: blocks as evenly as they go, the embedding on the first, the head on the last.

    >>> cut(8, 4)
    [range(0, 3), range(3, 5), range(5, 7), range(7, 10)]
    """
    bounds = [1 + stage * blocks // stages for stage in range(stages + 1)]
    bounds[0], bounds[-1] = 0, blocks + 2
    return [range(begin, end) for begin, end in pairwise(bounds)]


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """How surprised the model is by what comes next, on average."""
    return cross_entropy(scores.flatten(0, 1), target.flatten())
