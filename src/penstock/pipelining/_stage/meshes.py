"""The device meshes of tensors that are distributed, by what can be said of a mesh over a wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.tensor import DTensor

from penstock.errors import MetadataError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

MeshCacheKey: TypeAlias = tuple[tuple[str, ...], _MeshLayout | None]
"""The names of a mesh's dimensions, and its layout: sizes and strides over the ranks that all stages share."""


class PipeliningMetadataError(MetadataError):
    """Tensors are not what was agreed between stages, or cannot be described."""


class GetMeshCallback(Protocol):
    """Finds a mesh by the two parts of its key."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: _MeshLayout | None) -> DeviceMesh:
        """The mesh."""


class _MeshCache:
    """The meshes that are known, and a callback to find others."""

    def __init__(self, get_mesh_cb: GetMeshCallback | None = None) -> None:
        self._cache: dict[MeshCacheKey, DeviceMesh] = {}
        self._get_mesh_cb = get_mesh_cb

    def get_mesh(self, key: MeshCacheKey) -> DeviceMesh:
        """Get the mesh with this key; the callback is asked, once, for one that is not known."""
        if (known := self._cache.get(key)) is not None:
            return known
        names, layout = key
        if self._get_mesh_cb is None:
            raise PipeliningMetadataError(
                f"unknown mesh with mesh_dim_names={names} and mesh_layout={layout}; pass get_mesh= to the stage, "
                "or example tensors that are DTensors"
            )
        found: DeviceMesh | None = self._get_mesh_cb(names, layout)
        if found is None:
            raise PipeliningMetadataError(
                f"get_mesh returned None for mesh_dim_names={names} and mesh_layout={layout}; it must return the "
                "meshes of all stages"
            )
        self._cache[key] = found
        return found

    def put(self, key: MeshCacheKey, mesh: DeviceMesh) -> None:
        """Have this mesh known."""
        self._cache[key] = mesh

    def update_from_tensors(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Have the meshes of these tensors known; those that are known already stay."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                self._cache.setdefault(mesh_key(tensor.device_mesh), tensor.device_mesh)

    def __contains__(self, key: MeshCacheKey) -> bool:
        return key in self._cache

    def __len__(self) -> int:
        return len(self._cache)


def mesh_key(mesh: DeviceMesh) -> MeshCacheKey:
    """Get what a mesh is known by."""
    return tuple(mesh.mesh_dim_names or ()), mesh._layout
