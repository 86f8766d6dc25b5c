"""Encodes the metadata that stages exchange before the first microbatch, as numbers and text: nothing is pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from penstock.errors import MetadataError
from penstock.execution.backend_errors import reason_of
from penstock.execution.value_spec import describe
from penstock.execution.wire_format import HEADER_BYTES, header_tensor, read_header
from penstock.pipelining._utils import (
    PipeliningMetadataError,
    TensorMeta,
    _DTensorMeta,
    _StageBackwardMeta,
    _StageForwardMeta,
    _TensorMeta,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed._mesh_layout import _MeshLayout
    from torch.distributed.tensor.placement_types import Placement

    from penstock.execution.shared_memory import Groups


@dataclass(frozen=True, slots=True)
class DetailedForwardMeta(_StageForwardMeta):
    """What a stage sends the next one if microbatches differ in their shapes, or outputs share memory.

    Attributes:
        kinds: which kind each microbatch is of; empty if all are of one.
        others: the outputs for kinds other than the first.
        shared: which outputs share memory.
    """

    kinds: tuple[int, ...] = ()
    others: tuple[tuple[TensorMeta, ...], ...] = ()
    shared: Groups = ()


Message = _StageForwardMeta | _StageBackwardMeta
_FORWARD: Final = "forward"
_BACKWARD: Final = "backward"
_FLAGS: Final = {0: False, 1: True}


def encode(message: Any) -> list[torch.Tensor]:
    """Encode a message in one tensor of fixed size, and the rest of a long one in another.

    >>> meta = _TensorMeta.from_tensor(torch.ones(2, 3))
    >>> tensors = encode(_StageForwardMeta((meta,)))
    >>> decode(lambda tensor: tensor.copy_(tensors[0])) == _StageForwardMeta((meta,))
    True
    """
    if isinstance(message, _StageForwardMeta):
        value: list[Any] = [_FORWARD, [_written(meta) for meta in message.forward_metas]]
        if isinstance(message, DetailedForwardMeta):
            value += [list(message.kinds), [[_written(meta) for meta in metas] for metas in message.others]]
            value += [[list(group) for group in message.shared]]
    elif isinstance(message, _StageBackwardMeta):
        value = [_BACKWARD, [_written(meta) for meta in message.backward_metas]]
    else:
        raise PipeliningMetadataError(f"expected tensor metadata to send to another stage, got {message!r}")
    return [part for part in header_tensor(describe(value)) if part is not None]


class _NothingCameError(PipeliningMetadataError):
    """A message did not arrive."""


def decode(receive: Callable[[torch.Tensor], Any], device: torch.device | str | None = None) -> Message:
    """Receive and decode a message. ``receive`` fills a tensor; it is called once or twice."""

    def receive_or_explain(tensor: torch.Tensor) -> None:
        try:
            receive(tensor)
        except RuntimeError as error:
            raise _NothingCameError(
                "no tensor metadata arrived from the neighbouring stage; its process failed or exited, check its "
                f"output ({reason_of(error)})"
            ) from error

    try:
        return _message(_received(receive_or_explain, device))
    except _NothingCameError:
        raise
    except MetadataError as error:
        raise PipeliningMetadataError(
            f"the tensor metadata of the neighbouring stage cannot be used: {error}"
        ) from error
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise PipeliningMetadataError(
            f"the tensor metadata of the neighbouring stage could not be decoded ({type(error).__name__}: {error}); "
            "do all ranks run the same penstock version?"
        ) from error


def _received(receive: Callable[[torch.Tensor], Any], device: torch.device | str | None) -> Any:
    # Uninitialized memory could be taken for a header if nothing came.
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device)
    receive(header)
    found = read_header(header)
    if isinstance(found, int):
        overflow = torch.zeros(found, dtype=torch.uint8, device=device)
        receive(overflow)
        found = read_header(header, overflow)
    if isinstance(found, int):
        raise MetadataError("its length is not the one it states")
    return found.unflatten([])


def _message(value: Any) -> Message:
    direction, metas, *differing = value
    if direction == _BACKWARD and not differing:
        return _StageBackwardMeta(tuple(_read(meta) for meta in metas))
    if direction != _FORWARD:
        raise ValueError(f"unknown direction {direction!r}")
    first = _all_read(metas)
    if not differing:
        return _StageForwardMeta(first)
    kinds, others, shared = differing
    if (kinds or others) and set(kinds) != set(range(1 + len(others))):
        raise ValueError(f"{1 + len(others)} kinds of microbatches are described, but others occur")
    groups = tuple(map(_numbers, shared))
    if not {number for group in groups for number in group} <= set(range(len(first))):
        raise ValueError(f"{len(first)} tensors are described, but others share memory")
    return DetailedForwardMeta(first, _numbers(kinds), tuple(map(_all_read, others)), groups)


def _all_read(values: Any) -> tuple[TensorMeta, ...]:
    metas = [_read(value) for value in values]
    if None in metas:
        raise ValueError("a tensor is not described")
    return tuple(meta for meta in metas if meta is not None)


def _written(meta: TensorMeta | None) -> Any:
    if meta is None:
        return None
    plain = [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch."), int(meta.requires_grad)]
    if not isinstance(meta, _DTensorMeta):
        return [plain]
    placements = [_written_placement(placement) for placement in meta.placements]
    layout = None if meta.mesh_layout is None else [[list(one.shape), list(one.stride)] for one in meta.mesh_layout]
    return [plain, list(meta.global_shape), list(meta.global_stride), placements, list(meta.mesh_dim_names), layout]


def _read(value: Any) -> TensorMeta | None:
    if value is None:
        return None
    (shape, stride, name, requires_grad), *distributed = value
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"unknown element type {name!r}")
    plain = _size(shape), _numbers(stride), dtype, _FLAGS[requires_grad]
    if not distributed:
        return _TensorMeta(*plain)
    global_shape, global_stride, placements, names, layout = distributed
    return _DTensorMeta(
        *plain,
        _size(global_shape),
        _numbers(global_stride),
        tuple(_read_placement(*placement) for placement in placements),
        tuple(str(one) for one in names),
        _read_layout(layout),
    )


def _numbers(numbers: Any) -> tuple[int, ...]:
    return tuple(map(int, numbers))


def _size(numbers: Any) -> torch.Size:
    return torch.Size(_numbers(numbers))


def _written_placement(placement: Placement) -> list[Any]:
    """Write a placement by its exact type: an unknown kind would be taken for another."""
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    if type(placement) is _StridedShard:
        return ["strided shard", placement.dim, placement.split_factor]
    raise PipeliningMetadataError(
        f"a DTensor placed by {placement!r} cannot be sent between stages; "
        "redistribute it to Shard, Replicate or Partial"
    )


def _read_placement(kind: str, *settings: Any) -> Placement:
    if kind == "replicate":
        return Replicate()
    if kind == "shard":
        return Shard(*settings)
    if kind == "partial":
        return Partial(*settings)
    if kind == "strided shard":
        dim, split_factor = settings
        return _StridedShard(dim, split_factor=split_factor)
    raise ValueError(f"unknown placement {kind!r}")


def _read_layout(axes: Any) -> _MeshLayout | None:
    if axes is None:
        return None
    from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout

    return _MeshLayout(tuple(_FlatLayout(_numbers(shape), _numbers(stride)) for shape, stride in axes))
