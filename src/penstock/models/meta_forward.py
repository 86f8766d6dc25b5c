"""Runs the forward of a model whose parameters are on the meta device, on real inputs.

Glue, masks and position tables are computed as usual. An operator that takes a real tensor and a parameter returns made
up numbers of the right shape, which depend on the operator, the parameter and the values of the real tensors, or NaN if
it was given any: a value that is missing or wrong makes a difference to everything behind it. Data that decides
something, e.g. where a router sends a token, is therefore there, though not that of the model. What is computed from
parameters only must not decide anything.
"""

from __future__ import annotations

import math
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from penstock.errors import SplitError
from penstock.models.named_draws import is_view, memory_of, operands_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A value with more elements stays on the meta device if it was computed from parameters only: a converted weight.
_SMALL: Final = 1 << 20
#: The distance between the phases of neighbors, and the largest number that matters in a summary, since masks are huge.
_STEP: Final = 1.7
_BOUND: Final = 10.0
_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")


class MetaForward(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Runs operators that take parameters on the meta device, and makes their results real."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._from_parameters: set[StorageWeakRef] = set()
        self._numbers: dict[StorageWeakRef, int] = {}
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
        reads, writes = operands_of(func, args, kwargs)
        tensors = [*reads, *writes]
        present = [tensor for tensor in tensors if not self._is_absent(tensor)]
        if len(present) == len(tensors):
            if kwargs.get("device") == _META:  # which glue has read from a parameter
                kwargs = {**kwargs, "device": _CPU}
            return func(*args, **kwargs)
        if is_view(func):
            return func(*args, **kwargs)
        result = _call_on_meta(func, args, kwargs) if not present else _shapes(func, args, kwargs)
        value = self._summary(func, tensors, present)
        if writes:
            return self._write(func, writes, value)
        return tree_map_only(Tensor, lambda tensor: self._make_real(tensor, value, present), result)

    def _summary(self, func: Any, tensors: Sequence[Tensor], present: Sequence[Tensor]) -> float:
        """Return a number for an operator and all that it is given; NaN if that has any."""
        if any(map(_has_nan, present)):
            return float("nan")
        total = float(zlib.crc32(str(func).encode()) % 1000)
        for tensor in tensors:
            total += _mean(tensor) if not self._is_absent(tensor) else self._number_of(tensor)
        return total

    def _number_of(self, tensor: Tensor) -> int:
        """Return a number for a parameter and its views; 0 for what was computed from parameters only."""
        if not tensor.is_meta:
            return 0
        return self._numbers.setdefault(_key(tensor), len(self._numbers) + 1)

    def _is_absent(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or was computed from parameters only."""
        return tensor.is_meta or memory_of(tensor) in self._from_parameters

    def _make_real(self, tensor: Tensor, value: float, present: Sequence[Tensor]) -> Tensor:
        if not present and tensor.numel() > _SMALL:
            kept = tensor if tensor.is_meta else _on_meta(tensor)
            self._numbers[_key(kept)] = 0
            return kept
        made = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=present[0].device if present else _CPU
        )
        if not present and (key := memory_of(made)) is not None:
            self._from_parameters.add(key)
        return _fill(made, value) if present else made.zero_()

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
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).zero_()


def _key(tensor: Tensor) -> StorageWeakRef:
    """Identify the storage of a tensor on the meta device; no other one will be taken for it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _fill(tensor: Tensor, value: float) -> Tensor:
    """Fill a tensor with numbers between -0.5 and 0.5 that depend on their place and on a value; integers with 0."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.zero_()
    places = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
    return tensor.copy_((0.5 * torch.sin(places * _STEP + value)).reshape(tensor.shape))


def _mean(tensor: Tensor) -> float:
    """Return a mean of the elements of a tensor in which each has another weight."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    values = tensor.detach().double().flatten()
    values = values.clamp(-_BOUND, _BOUND) if tensor.is_floating_point() else values.sin()
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device).sin()
    return float(values @ weights) / math.sqrt(max(len(values), 1))


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())
