"""Finds microbatches with equal shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.execution.trees import tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The kind of each microbatch; microbatches of one kind have equal shapes.
Kinds = tuple[int, ...]


def find_kinds(args: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> tuple[Kinds, tuple[Any, ...]]:
    """Group microbatches by their shapes; return the kind of each, and the signature of each kind.

    >>> import torch
    >>> find_kinds([(torch.ones(2),), (torch.ones(2),), (torch.ones(1),)], [{}, {}, {}])[0]
    (0, 0, 1)
    """
    seen: dict[Any, int] = {}
    signatures = [_signature(one) + _signature(other) for one, other in zip(args, kwargs, strict=True)]
    return tuple([seen.setdefault(signature, len(seen)) for signature in signatures]), tuple(seen)


def _signature(values: tuple[Any, ...] | dict[str, Any]) -> tuple[Any, ...]:
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors_in(values)]) if values else ()
