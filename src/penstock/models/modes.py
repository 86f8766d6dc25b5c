"""Preserves whether each module of a model is in training or in eval mode."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module: some may be frozen in eval mode in a model that is trained.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    >>> with preserved_modes(model):
    ...     _ = model.eval()
    >>> model[0].training, model[1].training
    (True, False)
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
