"""The part of a checkpoint that is the model: parameters, buffers and extra state of the stages, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.errors import CheckpointError
from penstock.execution.parameter_names import plain_names
from penstock.execution.ties import near_matches
from penstock.runtime.checkpoints.names import entries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.execution.stage import Stage
    from penstock.runtime.checkpoints.names import StateNames


def collect_model(stages: Iterable[Stage], names: StateNames) -> dict[str, Any]:
    """Return what the stages hold, by name. Tensors share the memory of the stages."""
    found: dict[str, Any] = {}
    for stage in stages:
        for name, _, value in entries_of(stage.module):
            found.setdefault(names.name(stage.index, name), value)
    return found


def parameter_names(stages: Iterable[Stage], names: StateNames) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of the stages."""
    found: dict[torch.Tensor, str] = {}
    for stage in stages:
        if stage.parallel is not None:
            stage.parallel.reshard()  # so that modules have the tensors that optimizers have
        for parameter, name in plain_names(stage.module).items():
            found.setdefault(parameter, names.name(stage.index, name))
    return found


def prepare_model(stages: Iterable[Stage], names: StateNames, values: Mapping[str, Any]) -> Callable[[], None]:
    """Check values for the stages, by name: a parameter with several may have any of them. Returns what loads them."""
    loads = []
    missing: list[str] = []
    for stage in stages:
        fitted: dict[str, Any] = {}
        for name, key, target in entries_of(stage.module):
            wanted = names.name(stage.index, name)
            known = [one for one in names.names_of(wanted) if one in values]
            if known:
                fitted[key] = _fit(wanted, [values[one] for one in known], target)
            else:
                missing.append(wanted)
        loads.append((stage.module, fitted))
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"the state has no {missing[0]!r}{more}{near_matches(missing[0], values)}")

    def load() -> None:
        for module, fitted in loads:
            module.load_state_dict(fitted)

    return load


def _fit(name: str, values: list[Any], target: Any) -> Any:
    """Check that values under the names of one tensor are one, and fit the target."""
    first = values[0]
    if not isinstance(target, torch.Tensor):
        return first
    for value in values:
        if not isinstance(value, torch.Tensor) or value.shape != target.shape:
            seen = list(value.shape) if isinstance(value, torch.Tensor) else repr(value)
            raise CheckpointError(f"{name} has shape {list(target.shape)} in this pipeline, but {seen} in the state")
    if any(value is not first and not torch.equal(value, first) for value in values[1:]):
        raise CheckpointError(f"the state has several values for {name}, which is one parameter in this pipeline")
    return fit_tensor(name, first, target)


def fit_tensor(name: str, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Give a tensor the sharding of another one of the same shape."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    if _sharding(value) != _sharding(target):
        raise CheckpointError(
            f"{name} is sharded differently in the state and in this pipeline; save it and load it again, with "
            "torch.distributed.checkpoint or penstock.save and load"
        )
    return value


def _sharding(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
