"""Chooses tokens from logits, the same ones for any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.runtime.generation.request import Sampling


class Numbers:
    """The random numbers that tokens are drawn with: one for each sequence and token.

    Each new token of all sequences takes a row of ``torch.rand``, so neither the division into microbatches nor the
    order in which these run matters. The generator is not torch's default one, which is left alone.

    >>> numbers = Numbers(seed=3, sequences=2)
    >>> second = numbers.of(1)
    >>> torch.equal(numbers.of(0), torch.rand(2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    True

    Args:
        seed: of the generator.
        sequences: how many sequences there are.
    """

    def __init__(self, seed: int, sequences: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._sequences = sequences
        self._rows: list[torch.Tensor] = []

    def of(self, token: int) -> torch.Tensor:
        """Return the numbers of all sequences for a new token."""
        while len(self._rows) <= token:
            row = torch.rand(self._sequences, dtype=torch.float64, generator=self._generator)
            self._rows.append(row)
        return self._rows[token]


def choose(logits: torch.Tensor, sampling: Sampling, numbers: torch.Tensor | None) -> torch.Tensor:
    """Choose a token for each row of logits.

    Without numbers it is the most probable one. Else tokens are in their order in the vocabulary, each as wide as its
    probability, and the number of a row says where to look.

    >>> from penstock.runtime.generation.request import Sampling
    >>> logits = torch.tensor([[0.1, 0.7, 0.2]]).log()
    >>> choose(logits, Sampling(), None)
    tensor([1])
    >>> [int(choose(logits, Sampling(1.0), torch.tensor([u]))) for u in (0.05, 0.15, 0.75, 0.85)]
    [0, 1, 1, 2]
    >>> [int(choose(logits, Sampling(1.0, top_k=2), torch.tensor([u]))) for u in (0.05, 0.85)]
    [1, 2]
    """
    logits = logits.float()
    if numbers is None:
        return logits.argmax(-1)
    likely = torch.softmax(logits.double() / sampling.temperature, -1)
    if sampling.top_k is not None:
        likely = _keep_most_probable(likely, min(sampling.top_k, likely.shape[-1]))
    if sampling.top_p is not None:
        likely = _keep_nucleus(likely / likely.sum(-1, keepdim=True), sampling.top_p)
    below = likely.cumsum(-1)
    place = numbers.to(below)[:, None] * below[:, -1:]
    return torch.searchsorted(below, place, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)


def _keep_most_probable(likely: torch.Tensor, count: int) -> torch.Tensor:
    least = likely.topk(count, -1).values[:, -1:]
    return likely.masked_fill(likely < least, 0)


def _keep_nucleus(likely: torch.Tensor, share: float) -> torch.Tensor:
    """Keep the most probable tokens that together have at least this probability."""
    ordered, places = likely.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= share, 0)
    return torch.zeros_like(likely).scatter_(-1, places, ordered)
