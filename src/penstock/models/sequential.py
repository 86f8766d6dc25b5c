"""Splits an ``nn.Sequential`` by its structure alone: no forward, no example."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


class SequentialStage(nn.Sequential):
    """Some modules of an ``nn.Sequential``, under their original names.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> list(sequential_stage(model, ["1", "2"]).state_dict())
    ['2.weight', '2.bias']
    """

    def forward(self, *values: Any) -> Any:
        """Run the modules; a tuple comes spread into arguments, and each module takes one."""
        value = values[0] if len(values) == 1 else values
        for module in self:
            value = module(value)
        return value


def is_plain(model: nn.Module) -> bool:
    """Return whether a model does nothing but call its modules in turn."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def sequential_stage(model: nn.Module, names: Sequence[str]) -> SequentialStage:
    """Return the stage with these modules, which it shares with the model."""
    return SequentialStage(OrderedDict((name, model.get_submodule(name)) for name in names))
