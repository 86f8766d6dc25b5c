"""Tensors between stages, described: what each looks like, and all that belongs to a stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import torch
from torch.distributed.tensor import DTensor

from penstock.execution.autograd import is_differentiable
from penstock.pipelining._stage.meshes import MeshCacheKey, PipeliningMetadataError, mesh_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed._mesh_layout import _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """A tensor without its values; of a distributed one, the part that is here.

    >>> _TensorMeta.from_tensor(torch.ones(2, 3)).get_diff(_TensorMeta.from_tensor(torch.ones(2, 3).half()))
    ['dtype mismatch: torch.float32 vs torch.float16']
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> _TensorMeta:
        """Describe a plain tensor."""
        if isinstance(tensor, DTensor):
            raise PipeliningMetadataError("a DTensor is described by _DTensorMeta.from_dtensor")
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> torch.Tensor:
        """Make a tensor like this, with any values; it requires a gradient only if one can be made for its type."""
        tensor = _make_tensor_from_meta(self, device)
        return tensor.requires_grad_(self.requires_grad) if is_differentiable(self.dtype) else tensor

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """Describe what differs. Whether a gradient is required does not count: it depends on how a stage is run."""
        return _differences(self, other, ("shape", "stride", "dtype"))


@dataclass(frozen=True, slots=True)
class _DTensorMeta(_TensorMeta):
    """A distributed tensor without its values and without its mesh, which is found by ``mesh_cache_key``.

    Shape and stride are those of the part that is here.
    """

    global_shape: torch.Size = field(default_factory=torch.Size)
    global_stride: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_layout: _MeshLayout | None = None

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> _DTensorMeta:
        """Describe a distributed tensor."""
        local, (names, layout) = dtensor._local_tensor, mesh_key(dtensor.device_mesh)
        return _DTensorMeta(
            local.shape,
            local.stride(),
            dtensor.dtype,
            dtensor.requires_grad,
            dtensor.shape,
            dtensor.stride(),
            dtensor._spec.placements,
            names,
            layout,
        )

    @property
    def mesh_cache_key(self) -> MeshCacheKey:
        """What the mesh is known by."""
        return self.mesh_dim_names, self.mesh_layout

    def to_dtensor(self, device: torch.device | str, mesh: DeviceMesh) -> DTensor:
        """Make a distributed tensor like this, with any values."""
        distributed = DTensor.from_local(
            _make_tensor_from_meta(self, device),
            mesh,
            self.placements,
            run_check=False,
            shape=self.global_shape,
            stride=self.global_stride,
        )
        # Afterwards, so that it is a leaf.
        if self.requires_grad and is_differentiable(self.dtype):
            distributed.requires_grad_(True)
        return distributed

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """Describe what differs."""
        if self == other:
            return []
        differences = _TensorMeta.get_diff(self, other)
        if not isinstance(other, _DTensorMeta):
            return [*differences, "type: _DTensorMeta vs _TensorMeta"]
        names = ("global_shape", "global_stride", "placements", "mesh_dim_names", "mesh_layout")
        return differences + _differences(self, other, names)


TensorMeta: TypeAlias = _TensorMeta | _DTensorMeta


@dataclass(slots=True)
class _StageMeta:
    """What goes into a stage and comes out of it, as far as it is known; a gradient may be None."""

    inputs: tuple[TensorMeta, ...] | None = None
    outputs: tuple[TensorMeta, ...] | None = None
    input_grads: tuple[TensorMeta | None, ...] | None = None
    output_grads: tuple[TensorMeta | None, ...] | None = None

    def has_any(self) -> bool:
        """Whether anything is known."""
        return any(known is not None for known in (self.inputs, self.outputs, self.input_grads, self.output_grads))

    def has_dtensors(self) -> bool:
        """Whether an input or output is a distributed tensor."""
        return any(isinstance(meta, _DTensorMeta) for metas in (self.inputs, self.outputs) for meta in metas or ())

    def is_complete_for_forward(self) -> bool:
        """Whether inputs and outputs are known."""
        return self.inputs is not None and self.outputs is not None


@dataclass(frozen=True, slots=True)
class _StageForwardMeta:
    """The metadata that a stage sends to the next one: its outputs."""

    forward_metas: tuple[TensorMeta, ...]


@dataclass(frozen=True, slots=True)
class _StageBackwardMeta:
    """The metadata that a stage sends to the previous one: its input gradients, which may have other placements."""

    backward_metas: tuple[TensorMeta | None, ...]


class InferenceMode(Enum):
    """How stages know what comes: from what the user gave, or from a run through all of them."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def needs_dynamic(cls, meta: _StageMeta, stage_has_backward: bool) -> bool:
        """Whether what is known of a stage is too little to go by.

        The gradient of a plain tensor looks like the tensor. That of a distributed one may be distributed otherwise, so
        it must be known for itself.
        """
        if not meta.is_complete_for_forward():
            return True
        gradients_known = meta.input_grads is not None and meta.output_grads is not None
        return stage_has_backward and meta.has_dtensors() and not gradients_known


def _make_tensor_from_meta(meta: _TensorMeta, device: torch.device | str) -> torch.Tensor:
    """Make a plain tensor to receive into."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def _derive_grad_metas(tensor_metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta | None, ...]:
    """Describe the gradients of tensors, as far as they follow: None for one without, and for a distributed one."""
    return tuple(
        _TensorMeta(meta.shape, meta.stride, meta.dtype, requires_grad=False)
        if meta.requires_grad and not isinstance(meta, _DTensorMeta)
        else None
        for meta in tensor_metas
    )


def extract_tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """Describe a tensor of either kind."""
    return _DTensorMeta.from_dtensor(tensor) if isinstance(tensor, DTensor) else _TensorMeta.from_tensor(tensor)


@overload
def extract_tensor_metas(
    tensors: tuple[torch.Tensor, ...] | None, *, allow_none: Literal[False] = ...
) -> tuple[TensorMeta, ...] | None: ...


@overload
def extract_tensor_metas(
    tensors: tuple[torch.Tensor | None, ...] | None, *, allow_none: Literal[True]
) -> tuple[TensorMeta | None, ...] | None: ...


def extract_tensor_metas(
    tensors: tuple[torch.Tensor | None, ...] | None, *, allow_none: bool = False
) -> tuple[TensorMeta | None, ...] | None:
    """Describe tensors; with ``allow_none`` anything else becomes None, without it is an error."""
    if tensors is None:
        return None
    metas = tuple(extract_tensor_meta(tensor) if isinstance(tensor, torch.Tensor) else None for tensor in tensors)
    if not allow_none and None in metas:
        place = metas.index(None)
        raise PipeliningMetadataError(
            f"value {place} of {len(metas)} is {type(tensors[place]).__name__}, but a tensor is needed; "
            "pass allow_none=True if a value may be missing"
        )
    return metas


def _differences(one: _TensorMeta, other: _TensorMeta, names: Iterable[str]) -> list[str]:
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in names)
    return [f"{name} mismatch: {mine} vs {theirs}" for name, mine, theirs in pairs if mine != theirs]
