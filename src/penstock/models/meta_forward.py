"""Runs the forward of a model whose parameters are on the meta device, on real inputs.

Glue, masks and position tables are computed as usual. An operator that takes a real tensor and a parameter returns
zeros of the right shape, or NaN if it was given any, so that missing values can still be noticed. Data that decides
something, e.g. where a router sends a token, is therefore there, though not that of the model. What is computed from
parameters only must not decide anything.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from penstock.errors import SplitError
from penstock.models.named_draws import arguments_of, is_view, memory_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.multiprocessing.reductions import StorageWeakRef

#: A value with more elements stays on the meta device if it was computed from parameters only: a converted weight.
_SMALL: Final = 1 << 20
_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")


class MetaForward(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Runs operators that take parameters on the meta device, and makes their results real."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._from_parameters: set[StorageWeakRef] = set()
        self._attention = _RealAttention()

    def __enter__(self) -> MetaForward:
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._attention.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        reads, writes = arguments_of(func, args, kwargs)
        tensors = [*reads, *writes]
        present = [tensor for tensor in tensors if not self._is_absent(tensor)]
        if len(present) == len(tensors):
            if kwargs.get("device") == _META:  # which glue has read from a parameter
                kwargs = {**kwargs, "device": _CPU}
            return func(*args, **kwargs)
        if is_view(func):
            return func(*args, **kwargs)
        result = _call_on_meta(func, args, kwargs) if not present else _shapes(func, args, kwargs)
        value = float("nan") if any(map(_has_nan, present)) else 0.0
        if writes:
            return self._write(func, writes, value)
        return tree_map_only(Tensor, lambda tensor: self._make_real(tensor, value, present), result)

    def _is_absent(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or was computed from parameters only."""
        return tensor.is_meta or memory_of(tensor) in self._from_parameters

    def _make_real(self, tensor: Tensor, value: float, present: Sequence[Tensor]) -> Tensor:
        if not present and tensor.numel() > _SMALL:
            return tensor if tensor.is_meta else _on_meta(tensor)
        made = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=present[0].device if present else _CPU
        )
        if not present and (key := memory_of(made)) is not None:
            self._from_parameters.add(key)
        return _fill(made, value)

    def _write(self, func: Any, writes: list[Tensor], value: float) -> Any:
        """Write to the real tensors among those that an operator writes to, and return what it returns."""
        for tensor in writes:
            if not tensor.is_meta:
                _fill(tensor, value)
        if not func._schema.returns:
            return None
        return writes[0] if len(writes) == 1 else writes


class _RealAttention(TorchFunctionMode):
    """Makes parameters that are queries or keys real: attention compares devices before it reaches the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: tensor.clone() if tensor.is_meta else tensor, (args, kwargs)
            )
        return func(*args, **(kwargs or {}))


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the meta device; for one that takes real tensors only, the parameters are zeros meanwhile."""
    with suppress(Exception):
        converted, options = tree_map_only(Tensor, _on_meta, (args, kwargs))
        return func(*converted, **options)
    converted, options = tree_map_only(Tensor, _zeros, (args, kwargs))
    return func(*converted, **options)


def _call_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that takes parameters only."""
    converted, options = tree_map_only(Tensor, _on_meta, (args, kwargs))
    try:
        result = func(*converted, **options)
    except Exception as error:
        if "meta" not in str(error).lower():
            raise
        raise _needs_values(func) from error
    if func._schema.returns and not tensors_in(result):
        raise _needs_values(func)
    return result


def _needs_values(func: Any) -> SplitError:
    return SplitError(f"the model cannot be examined on the meta device: {func} needs the values of a parameter")


def _zeros(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor.detach().clone()
    return _fill(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype), 0.0)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _fill(tensor: Tensor, value: float) -> Tensor:
    return tensor.fill_(value if tensor.is_floating_point() or tensor.is_complex() else 0)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())
