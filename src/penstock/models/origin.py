"""Identifies the model that a split was made from: do all ranks begin with the same one?"""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import nn

#: How many values of each parameter are compared: two random draws differ in the first ones already.
_VALUES: Final = 64


def identify_values(model: nn.Module) -> str:
    """Return a digest of the names, shapes and first values of all parameters; empty if some have no values.

    >>> identify_values(nn.Linear(2, 2)) == identify_values(nn.Linear(2, 2))
    False
    """
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided:
            return ""
        row = parameter.detach()[(0,) * max(parameter.ndim - 1, 0)] if parameter.numel() else torch.empty(0)
        first = row.reshape(-1)[:_VALUES].to(torch.cdouble if row.is_complex() else torch.double).tolist()
        found.update(repr((name, tuple(parameter.shape), first)).encode())
    return f"values {found.hexdigest()[:12]}"


def identify_seed(init: str, seed: int | torch.Tensor) -> str:
    """Return a digest of what random values are drawn from.

    >>> identify_seed("exact", 3)
    'exact, seed 3'
    """
    if isinstance(seed, int):
        return f"{init}, seed {seed}"
    return f"{init}, random state {hashlib.sha256(bytes(seed.tolist())).hexdigest()[:12]}"
