"""Examines a model on an example, in the mode in which it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import SplitError
from penstock.models.model_source import examination
from penstock.models.probe import probe
from penstock.models.tree_copy import copy_tree

if TYPE_CHECKING:
    from torch import nn

    from penstock.models.record import Record
    from penstock.models.units import Units


def examine(model: nn.Module, units: Units, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """Probe a model, which is not changed.

    A model in eval mode, as libraries load it, is probed in training mode, or its dropout would not be seen. If it
    cannot run the example in training mode, the record is of eval mode and says so.
    """
    with examination(model):
        copy, its_units = _copy(model, units)
        if copy.training:
            return probe(copy, its_units, args, kwargs)
        copy.train()
        try:
            return probe(copy, its_units, args, kwargs)
        except SplitError as error:
            if error.__cause__ is None:  # it is not the model that has failed
                raise
        return probe(*_copy(model, units), args, kwargs)._replace(is_eval_only=True)


def _copy(model: nn.Module, units: Units) -> tuple[nn.Module, Units]:
    """Copy a model, whose forwards the probe changes; return the copy and its units."""
    copy = copy_tree(model)
    modules = dict(copy.named_modules(remove_duplicate=False))
    return copy, units._replace(
        units={name: modules[name] for name in units.units},
        glue={name: modules[name] for name in units.glue},
        containers={name: modules[name] for name in units.containers},
    )
