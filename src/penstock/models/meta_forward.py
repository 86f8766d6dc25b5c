"""Runs the forward of a model whose parameters are on the meta device, on real inputs.

Glue, masks and position tables are computed as usual. An operator that takes a real tensor and a parameter returns
zeros of the right shape, or NaN if it was given any, so that missing values can still be noticed. Data that decides
something, e.g. where a router sends a token, is therefore there, though not that of the model.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from penstock.errors import SplitError
from penstock.models.named_draws import arguments_of


class MetaForward(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Runs operators that take parameters on the meta device, and makes their results real."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        reads, writes = arguments_of(func, args, kwargs)
        on_meta = [tensor.is_meta for tensor in [*reads, *writes]]
        if not any(on_meta):
            if kwargs.get("device") == torch.device("meta"):  # which glue has read from a parameter
                kwargs = {**kwargs, "device": torch.device("cpu")}
            return func(*args, **kwargs)
        if all(on_meta):
            return _call_on_meta(func, args, kwargs)
        real = [tensor for tensor in [*reads, *writes] if not tensor.is_meta]
        value = float("nan") if any(map(_has_nan, real)) else 0.0
        result = _shapes(func, args, kwargs)
        if any(tensor.is_meta for tensor in writes):
            return result  # a parameter or buffer that is not there is written to
        for tensor in writes:
            _fill(tensor, value)
        if writes:
            return args[0] if len(writes) == 1 else writes
        return tree_map_only(Tensor, lambda tensor: _real(tensor, value, real[0].device), result)


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the meta device; for one that takes real tensors only, the parameters are zeros meanwhile."""
    with suppress(Exception):
        converted, options = tree_map_only(Tensor, _on_meta, (args, kwargs))
        return func(*converted, **options)
    converted, options = tree_map_only(Tensor, _zeros, (args, kwargs))
    return func(*converted, **options)


def _call_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that takes parameters only."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        if "meta" not in str(error).lower():
            raise
        raise SplitError(
            f"the model cannot be examined on the meta device: {func} needs the values of a parameter; pass a model "
            "that is not on the meta device"
        ) from error


def _zeros(tensor: Tensor) -> Tensor:
    return _real(tensor, 0.0, torch.device("cpu")) if tensor.is_meta else tensor.detach().clone()


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _real(tensor: Tensor, value: float, device: torch.device) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return _fill(made, value)


def _fill(tensor: Tensor, value: float) -> Tensor:
    return tensor.fill_(value if tensor.is_floating_point() or tensor.is_complex() else 0)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())
