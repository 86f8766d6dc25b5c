"""Values in a few words, for messages."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_aggregate


def friendly_debug_info(v: object) -> Any:
    """A tensor by its shape, whether it needs a gradient, and its element type; anything else as text.

    >>> friendly_debug_info(torch.ones(2))
    'Tensor(torch.Size([2]), grad=False, dtype=torch.float32)'
    """
    if isinstance(v, torch.Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return str(v)


def map_debug_info(a: Any) -> Any:
    """The same for every value in nested tuples, lists and dicts."""
    return map_aggregate(a, friendly_debug_info)
