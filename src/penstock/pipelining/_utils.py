"""What the modules of this package share: descriptions of tensors, flat arguments, and which rank holds which stage."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.ir.placement import Placement
from penstock.pipelining._stage.checks import (
    validate_and_normalize_to_tuple,
    validate_metadata,
    validate_static_arg_grad_correspondence,
    validate_tensors_metadata,
)
from penstock.pipelining._stage.meshes import GetMeshCallback, MeshCacheKey, PipeliningMetadataError, _MeshCache
from penstock.pipelining._stage.metadata import (
    InferenceMode,
    TensorMeta,
    _derive_grad_metas,
    _DTensorMeta,
    _make_tensor_from_meta,
    _StageBackwardMeta,
    _StageForwardMeta,
    _StageMeta,
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
)

if TYPE_CHECKING:
    from torch import fx

__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "MeshCacheKey",
    "PipeInfo",
    "PipeliningMetadataError",
    "TensorMeta",
    "_DTensorMeta",
    "_MeshCache",
    "_StageBackwardMeta",
    "_StageForwardMeta",
    "_StageMeta",
    "_TensorMeta",
    "_derive_grad_metas",
    "_make_tensor_from_meta",
    "extract_tensor_meta",
    "extract_tensor_metas",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "to_local_if_dtensor",
    "validate_and_normalize_to_tuple",
    "validate_metadata",
    "validate_static_arg_grad_correspondence",
    "validate_tensors_metadata",
]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PipeInfo:
    """What a traced pipeline says of itself."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """The leaves of nested arguments, in a list.

    With ``detach`` the arguments again, with tensors that have no history but require gradients as before, and the list
    of their leaves.

    >>> flatten_args(((1, 2), {"a": [3]}))
    [1, 2, 3]
    """
    leaves, treespec = tree_flatten(args)
    if not detach:
        return leaves
    leaves = [_detached(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(leaves, treespec), leaves


def flatten_args_detach(args: Any) -> Any:
    """``flatten_args`` with ``detach``, under its older name."""
    return flatten_args(args, detach=True)


def to_local_if_dtensor(tensor: torch.Tensor, detach: bool = False) -> torch.Tensor:
    """The part of a distributed tensor that is here; a plain tensor itself. With ``detach``, without history."""
    tensor = tensor.detach() if detach else tensor
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """The rank of each stage, in a loop or in a V.

    >>> generate_stage_to_rank_mapping(2, 4), generate_stage_to_rank_mapping(2, 4, style="v")
    ({0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1, 2: 1, 3: 0})
    """
    return dict(enumerate(_placement(pp_size, num_stages, style).rank_of))


def generate_rank_to_stage_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, list[int]]:
    """The stages of each rank that has any.

    >>> generate_rank_to_stage_mapping(2, 4, style="v")
    {0: [0, 3], 1: [1, 2]}
    """
    rows = _placement(pp_size, num_stages, style).rows
    return {rank: list(stages) for rank, stages in enumerate(rows) if stages}


def _placement(ranks: int, stages: int, style: str) -> Placement:
    if style == "loop":
        return Placement.loop(ranks, stages)
    if style != "v":
        raise ValueError(f"unknown style {style!r}; use 'loop' or 'v'")
    if stages % ranks:
        raise ValueError(
            f"a V needs a number of stages that is a multiple of the number of ranks, not {stages} stages on {ranks} "
            "ranks"
        )
    return Placement.v(ranks, stages)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
