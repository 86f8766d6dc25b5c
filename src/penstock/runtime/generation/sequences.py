"""Keeps the sequences of a microbatch while they grow; every rank has all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.runtime.generation.request import Request


class Sequences:
    """The sequences of one microbatch.

    Args:
        request: what is generated.
        rows: which sequences they are.
        device: where the stages of this rank are.

    Attributes:
        rows: which sequences they are.
        known: how many new tokens are known.
        has_ended: whether all of them have ended.
    """

    def __init__(self, request: Request, rows: slice, device: torch.device) -> None:
        prompts, mask = request.prompts[rows], request.mask[rows]
        count, self._width = prompts.shape
        new = torch.full((count, request.new), request.padding, device=prompts.device)
        self.rows = rows
        self.known = 0
        self.has_ended = False
        self._request = request
        self._tokens = torch.cat([prompts, new], 1).to(device)
        self._mask = None if request.mask.all() else torch.cat([mask, torch.ones_like(new).bool()], 1).long().to(device)
        self._positions = (mask.long().cumsum(1) - 1).clamp_(min=0).to(device)
        self._ended = torch.zeros(count, dtype=torch.bool, device=device)
        self._ends = torch.tensor(request.ends, dtype=torch.long, device=device)

    @property
    def tokens(self) -> torch.Tensor:
        """Prompts and new tokens, with padding where a sequence has ended."""
        return self._tokens

    def inputs(self, token: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return what the model is called with to compute a new token: tokens, which ones count, and positions."""
        end = self._width + token
        mask = None if self._mask is None else self._mask[:, :end]
        if token == 0:
            return self._tokens[:, :end].contiguous(), mask, self._positions
        return self._tokens[:, end - 1 : end].contiguous(), mask, self._positions[:, -1:] + token

    def pad(self, chosen: torch.Tensor) -> torch.Tensor:
        """Replace the tokens chosen for sequences that have ended."""
        return torch.where(self._ended, self._request.padding, chosen)

    def append(self, tokens: torch.Tensor) -> None:
        """Append a token to each sequence."""
        self._tokens[:, self._width + self.known] = tokens
        self.known += 1
        if len(self._ends):
            self._ended |= torch.isin(tokens, self._ends)
        self.has_ended = self.known == self._request.new or bool(self._ended.all())
