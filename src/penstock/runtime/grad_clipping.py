"""Computes the norm of all gradients of a pipeline, and clips them to a maximum norm."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from penstock.errors import RunError, StageError
from penstock.execution.distributed_tensors import is_distributed, local_part, placed_like
from penstock.execution.stage import device_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.runtime.transport.protocol import Transport

_NORM: Final = struct.Struct("<d?")
_WIDE: Final = (torch.float64, torch.complex128)
_NARROW: Final = (torch.float16, torch.bfloat16)
#: Added to the norm before it divides, as torch does.
_TINY: Final = 1e-6


def clip_grad_norm_(
    stages: Mapping[int, Stage],
    transport: Transport,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    uncounted: Collection[torch.nn.Parameter] = (),
    unscaled: Collection[torch.nn.Parameter] = (),
) -> torch.Tensor:
    """Scale the gradients of a pipeline down to a norm of `max_norm` at most; all ranks call it.

    Args:
        stages: the stages of this rank.
        transport: what connects the ranks.
        max_norm: the largest norm that is left as it is.
        norm_type: the order of the norm.
        error_if_nonfinite: whether to raise if the norm is not a finite number.
        uncounted: the parameters that count elsewhere: each tie counts once.
        unscaled: the parameters whose gradients another rank of this process scales.

    >>> from penstock.execution.stage import Stage
    >>> from penstock.runtime.transport.threads import thread_transports
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> clip_grad_norm_({0: Stage(0, layer)}, thread_transports(1)[0], max_norm=1.0)
    tensor(5.)
    >>> layer.weight.grad
    tensor([[0.6000, 0.8000]])

    Returns:
        The norm before, the same on every rank.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    check_norm_type(norm_type)
    parameters = parameters_of(stages)
    reports = transport.exchange(report_norm(without(parameters, uncounted), parameters, norm_type))
    total, is_wide = total_norm(reports, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RunError(
            f"the norm of order {norm_type:g} of the gradients is {total}, so they cannot be clipped; to scale them "
            "anyway, pass error_if_nonfinite=False"
        )
    factor = clipping_factor(total, max_norm)
    if factor is not None:
        scale_gradients(without(parameters, unscaled), factor)
    return torch.tensor(total, dtype=torch.float64 if is_wide else torch.float32, device=device_of(stages))


def check_norm_type(norm_type: float) -> None:
    """Refuse an order that no norm has."""
    if not norm_type > 0:
        raise StageError(f"norm_type must be a positive number, or inf for the largest gradient, not {norm_type!r}")


def report_norm(
    counted: Sequence[torch.nn.Parameter], parameters: Sequence[torch.nn.Parameter], norm_type: float
) -> bytes:
    """Report the norm of this rank's gradients, for the total. All ranks that hold shards call it together.

    Args:
        counted: the parameters whose gradients count.
        parameters: all of this rank; their types decide that of the total.
        norm_type: the order of the norm.
    """
    is_wide = any(parameter.grad.dtype in _WIDE for parameter in parameters if parameter.grad is not None)
    return _NORM.pack(shared_norm(counted, norm_type), is_wide)


def total_norm(reports: Iterable[bytes], norm_type: float) -> tuple[float, bool]:
    """Combine the reports of ranks, in their order; also returns whether the total is of double precision."""
    norms, widths = zip(*map(_NORM.unpack, reports), strict=True)
    return combined(norms, norm_type), any(widths)


def clipping_factor(norm: float, max_norm: float) -> float | None:
    """Find by what to multiply gradients of this norm; None to leave them as they are.

    >>> clipping_factor(0.5, 1.0), clipping_factor(math.inf, 1.0)
    (None, 0.0)
    """
    factor = max_norm / (norm + _TINY)
    return None if factor >= 1 else factor  # not None if it is not a number


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply gradients in place."""
    for gradient in local_gradients(parameters):
        gradient.mul_(factor)


def parameters_of(stages: Mapping[int, Stage]) -> list[torch.nn.Parameter]:
    """List the parameters of some stages, each once."""
    return list(dict.fromkeys(parameter for stage in stages.values() for parameter in stage.module.parameters()))


def without(
    parameters: Sequence[torch.nn.Parameter], others: Collection[torch.nn.Parameter]
) -> Sequence[torch.nn.Parameter]:
    """Leave some parameters out."""
    left_out = set(others)
    return [one for one in parameters if one not in left_out] if left_out else parameters


def local_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """List the gradients, or this rank's shards of them, without empty ones. Modify them only in place.

    Of a sparse one, these are the values that it has, also where several are for one element.
    """
    parts = [_values(local_part(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    return [part for part in parts if part.numel() > 0]


def shared_norm(parameters: Sequence[torch.nn.Parameter], norm_type: float) -> float:
    """Compute the norm of this rank's gradients. All shards of a gradient count; of equal copies, one.

    All ranks that hold shards call it together.
    """
    together: dict[tuple[Any, ...], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad or parameter.grad is not None:
            together.setdefault(_shard_groups(parameter), []).append(parameter)
    norms = []
    for groups, alike in together.items():
        norm = combined(_norms([_placed(one) for one in alike if one.grad is not None], norm_type), norm_type)
        for group in groups:
            norm = combined(_gathered(norm, group, alike[0].device), norm_type)
        norms.append(norm)
    return combined(norms, norm_type)


def combined(norms: Sequence[float], norm_type: float) -> float:
    """Combine the norms of parts into the norm of the whole.

    >>> combined([3.0, 4.0], 2.0), combined([3.0, 4.0], math.inf)
    (5.0, 4.0)
    """
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if largest == 0 or math.isinf(largest) or math.isinf(norm_type):
        return largest
    # Divided first, so that no power is too large for a number.
    return float(largest * math.fsum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type))


def _norms(tensors: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    """Compute the norm of each non-empty tensor, at least in single precision."""
    norms = [
        torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32 if tensor.dtype in _NARROW else None)
        for tensor in tensors
        if tensor.numel() > 0
    ]
    if not norms:
        return []
    # On one device, so that there is a single synchronization.
    values: list[float] = torch.stack([norm.to(norms[0]) for norm in norms]).tolist()
    return values


def _gathered(norm: float, group: dist.ProcessGroup, device: torch.device) -> list[float]:
    mine = torch.tensor([norm], dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    norms: list[float] = torch.cat(all_of_them).tolist()
    return norms


def _placed(parameter: Any) -> torch.Tensor:
    """Get the gradient of a parameter, or this rank's shard of it, sharded like the parameter."""
    gradient = local_part(placed_like(parameter.grad.detach(), parameter))
    return _values(gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Get the elements that a tensor has in memory."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def _shard_groups(parameter: Any) -> tuple[dist.ProcessGroup, ...]:
    """Find the groups over which a parameter is sharded; none for one that is whole here."""
    if not is_distributed(parameter):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
