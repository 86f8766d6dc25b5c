"""Checks that the stages of a split compute what the model does, and finds which module is in the way if not."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from penstock.errors import SplitError
from penstock.execution.preserved_state import preserved_state
from penstock.models.dummies import INTEGERS
from penstock.models.numbers import changed_numbers, note_reads, numbers_of, outdated
from penstock.models.outside_state import OutsideState, changes, expand, places_in
from penstock.models.self_check import (
    Outside,
    find_difference,
    has_nan,
    make_channel_error,
    make_error,
    make_integer_error,
    make_number_error,
    make_state_error,
    run_stages,
)
from penstock.models.side_channels import Observed, describe_channel
from penstock.models.tree_copy import copy_tree
from penstock.models.values import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import nn

    from penstock.ir.edges import Edge
    from penstock.models.inputs import Example

#: What integer dummies are in the calls of a check: a model that reads them computes something else in one of these.
_INTEGERS: Final = (0, 1)
#: What floating-point inputs are multiplied by in the second call.
_OTHER: Final = 0.75
#: The name of no unit: with it, no dummy is NaN.
_NO_UNIT: Final = "(none)"
_SECOND: Final = "in a second call"
_FAILS: Final = "it fails with"


class Stages(NamedTuple):
    """The stages to check.

    Attributes:
        layout: the units of each stage.
        edges: what they send each other.
        glue: the names of glue modules, whose outputs may be needed on several stages.
        make: makes the module of a stage, with NaN for the values of these units.
    """

    layout: tuple[tuple[str, ...], ...]
    edges: Sequence[Edge]
    glue: Collection[str]
    make: Callable[[int, Collection[str]], nn.Module]


class SplitCheck:
    """Compares stages with their model in two calls: state may go from one call to the next.

    The second call has other inputs than the first, unless the model refuses them: a value that a layer has stored may
    be there from an earlier call with the same ones.
    """

    def __init__(self, model: nn.Module, stages: Stages, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = model
        self._stages = stages
        self._calls: list[Example] = [(args, kwargs), _change((args, kwargs))]
        self._outside = OutsideState(model)
        self._changed: dict[str, Any] = {}

    def run(self) -> None:
        """Raise SplitError that names the module whose value is missing."""
        names = ["", *(name for stage in self._stages.layout for name in stage), *self._stages.glue]
        expected, difference = self._compare(names)
        if difference is None:
            self._check_numbers(names)
            return
        is_second = difference.startswith(_SECOND)
        if (is_second or "IndexError" in difference) and self._difference(names, expected, (0, 0)) is None:
            if is_second:
                raise make_integer_error(difference)
            return  # an integer is out of range, but nothing depends on what it selects
        culprits = () if has_nan(expected) or self._fails_without_nan() else names
        culprit = next((name for name in culprits if self._is_read(name)), None)
        channel = self._find_channel() if culprit is None else None
        if channel is not None:
            raise make_channel_error(*channel, difference)
        raise make_state_error(self._find_state(), difference) if is_second else make_error(culprit, difference)

    def _compare(self, poison: Collection[str]) -> tuple[list[Any], str | None]:
        """Return what the model returns, and in what the stages differ.

        Both calls have the same inputs if the other ones lead to a failure: it would be noticed in training, too.
        """
        with suppress(Exception):
            expected = self._run_model()
            difference = self._difference(poison, expected)
            if difference is None or not difference.startswith(_FAILS):
                return expected, difference
        self._calls[1] = self._calls[0]
        expected = self._run_model()
        return expected, self._difference(poison, expected)

    def _difference(
        self, poison: Collection[str], expected: Sequence[Any], integers: tuple[int, int] = _INTEGERS
    ) -> str | None:
        """Describe in what the stages differ from the model; None if they do not."""
        try:
            found = self._run_stages(poison, integers)
        except SplitError:
            raise
        except Exception as error:  # from the model's own code, which has met what it should not have read
            return f"{_FAILS} {type(error).__name__}: {error}"
        first, second = (find_difference(*pair) for pair in zip(found, expected, strict=True))
        return f"{_SECOND}, {second}" if first is None and second is not None else first

    def _fails_without_nan(self) -> bool:
        try:
            self._run_stages([_NO_UNIT])
        except Exception:
            return True
        return False

    def _is_read(self, unit: str) -> bool:
        """Return whether some stage reads a dummy for a value of a unit."""
        try:
            return has_nan(self._run_stages([unit]))
        except Exception:
            return True

    def _run_model(self, watch: Callable[[nn.Module], None] | None = None) -> list[Any]:
        with self._undisturbed(), self._outside.preserved():
            model = copy_tree(self._model)
            if watch is not None:
                watch(model)
            before = numbers_of(model)
            results = [model(*args, **kwargs) for args, kwargs in self._inputs()]
            self._changed = changed_numbers(before, numbers_of(model))
            return results

    def _run_stages(
        self,
        poison: Collection[str],
        integers: tuple[int, int] = _INTEGERS,
        watch: Callable[[int, nn.Module], None] | None = None,
    ) -> list[Any]:
        """Run the stages in two calls, with these integers for what they must not read."""
        with self._undisturbed():
            modules = {stage: self._stages.make(stage, poison) for stage in range(len(self._stages.layout))}
            if watch is not None:
                for stage, module in modules.items():
                    watch(stage, module)
            outside, results = Outside(self._outside), []
            for number, (args, kwargs) in zip(integers, self._inputs(), strict=True):
                token = INTEGERS.set(number)
                try:
                    results.append(run_stages(modules, self._stages.edges, args, kwargs, outside))
                finally:
                    INTEGERS.reset(token)
            return results

    def _check_numbers(self, poison: Collection[str]) -> None:
        """Refuse stages that read a number of a module without changing it as the model does: it may matter later."""
        if not self._changed:
            return
        modules: dict[int, nn.Module] = {}
        self._run_stages(poison, watch=modules.__setitem__)
        stale = {stage: outdated(self._changed, numbers_of(module)) for stage, module in modules.items()}
        read: list[tuple[int, str]] = []

        def watch(stage: int, module: nn.Module) -> None:
            note_reads(module, stale[stage], lambda name: read.append((stage, name)))

        if any(stale.values()):
            self._run_stages(poison, watch=watch)
        for stage, name in read:
            raise make_number_error(stage, name, *stale[stage][name])

    def _find_channel(self) -> tuple[str, str, str] | None:
        """Find two units of which one stores a value that the other misses."""
        layout = self._stages.layout
        whole, parts = Observed(), {stage: Observed() for stage in range(len(layout))}
        self._run_model(lambda model: whole.watch(model, [name for stage in layout for name in stage], stores=True))
        with suppress(Exception):
            self._run_stages(
                [_NO_UNIT], watch=lambda stage, module: parts[stage].watch(module, layout[stage], stores=False)
            )
        return describe_channel(whole, parts, {name: stage for stage, names in enumerate(layout) for name in names})

    def _find_state(self) -> list[str]:
        """Find what a call of the model changes outside its units."""
        with self._undisturbed(), self._outside.preserved():
            model = copy_tree(self._model)
            observed = Observed()
            observed.watch(model, [name for stage in self._stages.layout for name in stage], stores=True)
            before = [(place, place.read()) for place in expand(places_in(model))]
            args, kwargs = next(self._inputs())
            model(*args, **kwargs)
            stored = {place for places in observed.stored.values() for place in places}
            return [place for place in dict.fromkeys(changes(before)) if place not in stored]

    def _inputs(self) -> Iterator[Example]:
        """Yield copies of the inputs of both calls: a call may change its arguments."""
        for call in self._calls:
            yield pytree.tree_map_only(torch.Tensor, torch.clone, call)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        device = next((tensor.device for tensor in tensors_of(self._calls)), torch.device("cpu"))
        with preserved_state(self._model, device):
            yield


def _change(example: Example) -> Example:
    """Return other inputs that a model is likely to take: smaller numbers, and the same integers in other places."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor * _OTHER
        return tensor.roll(1, -1) if tensor.ndim else tensor

    changed: Example = pytree.tree_map_only(torch.Tensor, change, example)
    return changed
