"""Looks at tensors that may be sharded over ranks: DTensors, as ``fully_shard`` and tensor parallelism make them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor. None exist if that type has not been imported.

    >>> import torch
    >>> is_distributed(torch.ones(2))
    False
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Any) -> torch.Tensor:
    """Get this rank's shard of a tensor, or all of one that is not sharded."""
    part: torch.Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return part


def full_tensor(tensor: Any) -> torch.Tensor:
    """Get all of a tensor. All ranks that hold shards of it call it together."""
    whole: torch.Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
    return whole


def placed_like(gradient: Any, parameter: Any) -> Any:
    """Get a gradient that is sharded like its parameter. All ranks that hold shards call it together."""
    if is_distributed(gradient) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def from_local_part(part: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Make a tensor that is sharded like a parameter from this rank's shard."""
    if not is_distributed(parameter):
        return part
    made: torch.Tensor = type(parameter.data).from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def describe_sharding(parameter: Any) -> str:
    """Describe which shard of a parameter this rank has; empty if the parameter is not sharded."""
    if not is_distributed(parameter):
        return ""
    mesh = parameter.device_mesh
    placements = ", ".join(map(str, parameter.placements))
    return f"{placements} over {list(mesh.shape)} ranks, shard {list(mesh.get_coordinate() or ())}"
