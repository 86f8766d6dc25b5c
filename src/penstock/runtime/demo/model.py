"""A small GPT in plain torch: nothing in it knows of pipelines."""

from __future__ import annotations

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


class Gpt(nn.Module):
    """Predicts the next byte."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = Head()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes to scores for the bytes after them."""
        value = self.embedding(tokens)
        for block in self.blocks:
            value = block(value)
        scores: Tensor = self.head(value)
        return scores


def build(blocks: int = 8, seed: int = 0) -> Gpt:
    """Build the model, with the same weights on every rank."""
    torch.manual_seed(seed)
    return Gpt(blocks)


def example() -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """Return the arguments of a call with a microbatch."""
    return (torch.zeros(4, CONTEXT, dtype=torch.long),), {}


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of the next byte."""
    return cross_entropy(scores.flatten(0, 1), target.flatten())
