"""Checks a split by running it: stage by stage in this process, with NaN for all that a stage must not read."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import SplitError
from penstock.models.values import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from penstock.ir.edges import Edge
    from penstock.models.outside_state import OutsideState


class Outside:
    """The state outside a model, for each stage apart."""

    def __init__(self, state: OutsideState) -> None:
        self._state = state
        self._before = state.take()
        self._by_stage: dict[int, Any] = {}

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Let a stage run with the state that it has left, or that there was before all stages."""
        self._state.put(self._by_stage.get(stage, self._before))
        try:
            yield
        finally:
            self._by_stage[stage] = self._state.take()
            self._state.put(self._before)


def run_stages(
    stages: Mapping[int, nn.Module],
    edges: Sequence[Edge],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outside: Outside | None = None,
) -> Any:
    """Run the stages one after the other, hand over values along the edges, and return what the last one returns.

    With ``outside``, each stage finds the global state as it has left it itself, as if it were on a rank of its own.
    """
    values: dict[int, Any] = {}
    result: Any = None
    for stage, module in sorted(stages.items()):
        received = tuple(values[number] for number, edge in enumerate(edges) if stage in edge.targets)
        with nullcontext() if outside is None else outside.of_stage(stage):
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


def make_channel_error(reader: str, writer: str, places: str, difference: str) -> SplitError:
    """Return the error for a value that one unit stores and one of another stage finds."""
    return SplitError(
        f"{reader!r} does not compute on its stage what it computes in the model: {writer!r}, on another stage, stores "
        f"{places}, which is not sent ({difference}); keep {writer!r} and {reader!r} on one stage, or return the value "
        "and pass it as an argument",
        unit=reader,
    )


def make_integer_error(difference: str) -> SplitError:
    """Return the error for a stage that depends on the integers in place of an input or of another stage's output."""
    return SplitError(
        "a stage reads integers that it is not sent: with other integers in their place it computes something else "
        f"({difference}); pass such an input by keyword, since every stage has those, or trace the model with "
        "penstock.pipelining.pipeline"
    )


def make_number_error(stage: int, name: str, found: Any, expected: Any) -> SplitError:
    """Return the error for a number of a module that a stage reads, while only other stages change it."""
    return SplitError(
        f"stage {stage} reads {name}, but does not run all of the code that changes it: after two calls it is "
        f"{found!r} there, and {expected!r} in the model; return it from a layer as a tensor, or change it in the "
        "training loop",
        unit=name,
    )


def make_state_error(places: Sequence[str], difference: str) -> SplitError:
    """Return the error for state outside the units that a later call finds, and that only some stages update."""
    return SplitError(
        f"the code around the layers changes {', '.join(places) or 'something'}, which later calls read, but not every "
        f"stage runs all of that code ({difference}); keep such state in a buffer of a layer, or in the training loop"
    )
