"""Checks a split by running it: stage by stage in this process, with NaN for all that a stage must not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import SplitError
from penstock.models.values import tensors_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from penstock.ir.edges import Edge


def run_stages(
    stages: Mapping[int, nn.Module], edges: Sequence[Edge], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run the stages one after the other, hand over values along the edges, and return what the last one returns."""
    values: dict[int, Any] = {}
    result: Any = None
    for stage, module in sorted(stages.items()):
        received = tuple(values[number] for number, edge in enumerate(edges) if stage in edge.targets)
        result = module(*(received if stage else args), **kwargs)
        outgoing = [number for number, edge in enumerate(edges) if edge.source == stage]
        values.update(zip(outgoing, [result] if len(outgoing) == 1 else result, strict=True) if outgoing else ())
    return result


def find_difference(result: Any, expected: Any) -> str | None:
    """Describe how two outputs differ; None if they are equal, or as close as rounding allows."""
    ours, theirs = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"the output has {len(ours)} values instead of {len(theirs)}"
    for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
            return f"value {position} of the output is a {type(one).__name__} instead of a {type(other).__name__}"
        if isinstance(one, torch.Tensor):
            try:
                torch.testing.assert_close(one, other, equal_nan=True)
            except AssertionError as error:
                return f"value {position} of the output differs: {' '.join(str(error).split())}"
    return None


def has_nan(value: Any) -> bool:
    """Return whether any floating-point tensor of a value has a NaN."""
    return any(bool(tensor.isnan().any()) for tensor in tensors_of(value) if tensor.is_floating_point())


def make_error(unit: str | None, difference: str) -> SplitError:
    """Return the error for a split that does not compute what the model does."""
    if unit is None:
        return SplitError(
            f"the stages do not compute what the model does: {difference}; name the stages with layout=, or trace the "
            "model with penstock.pipelining.pipeline"
        )
    return SplitError(
        f"a stage reads a value of {unit!r} that was not found to be needed there ({difference}); keep {unit!r} and "
        "what follows it on one stage, or trace the model with penstock.pipelining.pipeline",
        unit=unit,
    )
