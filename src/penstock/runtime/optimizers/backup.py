"""Keeps what a step of an optimizer changes, so that it can be undone exactly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import StageError
from penstock.execution.distributed_tensors import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The parameter, and the key of a value that the optimizer keeps for it; None for the parameter itself.
_Place = tuple[torch.nn.Parameter, Any]


def check_reversible(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that may change more than ``state`` and ``param_groups``, or the gradients."""
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim."):
        raise StageError(
            f"post_validate=True undoes steps, but a step of {name} may change more than its state "
            "and its options; use one of torch.optim's optimizers, or leave it out"
        )
    if any(_modifies_gradients(group) for group in optimizer.param_groups):
        raise StageError(
            f"post_validate=True may take a step again, but {name} with nesterov=True and foreach modifies the "
            "gradients; pass foreach=False, or leave post_validate out"
        )


def _modifies_gradients(group: dict[str, Any]) -> bool:
    """Whether a step adds the momentum to the gradients in place, as that of SGD may, by default on devices."""
    if not group.get("nesterov") or "foreach" not in group or group.get("fused"):
        return False
    on_device = all(one.device.type != "cpu" for one in group["params"])
    return bool(on_device if group["foreach"] is None else group["foreach"])


class _Options(NamedTuple):
    """The options of a group, without its parameters."""

    group: dict[str, Any]
    values: dict[str, Any]


class Backup:
    """What a step changes: parameters with a gradient, what the optimizer keeps for them, and its options.

    Its memory is allocated once: as much again as these parameters and their state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[_Place, torch.Tensor] = {}
        self._tensors: dict[_Place, torch.Tensor] = {}
        self._values: dict[_Place, Any] = {}
        self._stepped: Sequence[torch.nn.Parameter] = ()
        self._options: Sequence[_Options] = ()

    @torch.no_grad()
    def take(self) -> None:
        """Copy all that a step may change."""
        groups = self._optimizer.param_groups
        self._stepped = [one for group in groups for one in group["params"] if one.grad is not None]
        self._options = [_Options(group, _options_of(group)) for group in groups]
        self._tensors, self._values = {}, {}
        for parameter in self._stepped:
            self._tensors[parameter, None] = local_part(parameter)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self._tensors[parameter, key] = local_part(value)
                else:
                    self._values[parameter, key] = copy.deepcopy(value)
        self._copies = {place: self._room(place, tensor) for place, tensor in self._tensors.items()}
        _copy(self._copies, self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step since ``take``."""
        _copy(self._tensors, self._copies)
        state = self._optimizer.state
        for parameter in self._stepped:
            kept = state.get(parameter, {})
            for key in list(kept):
                if (parameter, key) in self._values:
                    kept[key] = copy.deepcopy(self._values[parameter, key])
                elif (parameter, key) not in self._tensors:
                    del kept[key]
            if not kept:
                state.pop(parameter, None)

    def swap_options(self) -> None:
        """Put the options of the step in the place of the present ones, and the other way round."""
        for group, values in self._options:
            present = {key: group[key] for key in values}
            group.update(values)
            values.update(present)

    def _room(self, place: _Place, tensor: torch.Tensor) -> torch.Tensor:
        room = self._copies.get(place)
        if room is not None and (room.shape, room.dtype, room.device) == (tensor.shape, tensor.dtype, tensor.device):
            return room
        return torch.empty_like(tensor, requires_grad=False)


def _copy(targets: dict[_Place, torch.Tensor], sources: dict[_Place, torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets.values()), list(sources.values()))


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the options of a group: schedulers change them, also in place if they are tensors."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
