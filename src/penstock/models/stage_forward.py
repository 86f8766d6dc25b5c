"""Runs the forward of a model as one stage: its own units run, received values stand in for the others.

The forward ends as soon as everything that the stage sends is known.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from penstock.errors import SplitError
from penstock.models.call_checks import CallChecks, ResultChecks
from penstock.models.dummies import Dummies, Run
from penstock.models.edges import leaf_of, name_of
from penstock.models.generation.stage_cache import seen_tokens
from penstock.models.record import ARGUMENT, INNER, INPUT, OUTPUT, Call, Source
from penstock.models.sources import wrap_forward
from penstock.models.values import dtype_name, leaves_by_path, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.models.plan import Plan
    from penstock.models.units import Units

_AGAIN: Final = "split the model again with example=(args, kwargs) like the ones it is called with"
_NOTE: Final = (
    "This was raised on stage {} of a split, where values that layers of other stages store (in attributes, "
    "dictionaries or globals) are missing; ps.split(..., check=True) finds such layers."
)


class _Stop(BaseException):
    """Ends a forward behind the last unit of a stage; not an Exception, which models may catch."""


class StageForward:
    """Runs the forward of a copied model as one stage."""

    def __init__(self, model: nn.Module, plan: Plan, poison: frozenset[str]) -> None:
        self._plan = plan
        self._calls = plan.record.calls
        self._received, self._sent = plan.received, set(plan.sent)
        self._returned = plan.sent
        self._leaves = [leaf_of(plan.record, source) for source in self._received] if plan.stage else []
        self._returning = {source.call for source in plan.sent if source.kind == OUTPUT}
        self._end, self._unneeded = plan.end, plan.unneeded & _optional(model)
        self._changed = frozenset(plan.record.changed)
        self._dummies = Dummies(plan, poison)
        self._run: Run | None = None
        self._model = model
        self._checks, self._result_checks = CallChecks(model, plan), ResultChecks(plan)
        self._inner_modules: dict[str, nn.Module] = {}

    def install(self, units: Units) -> None:
        """Replace the forwards of the units, of glue that draws random numbers, and of the model."""
        own = {
            call.unit
            for call, stage in zip(self._calls, self._plan.flow.stages, strict=True)
            if stage == self._plan.stage
        }
        called = {call.unit for call in self._calls}
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for name in dict.fromkeys(name for name in (*units.units, *units.glue) if name in called):
            wrap_forward(modules[name], self._call, name)
        for call in self._calls:
            for inner in call.inner_calls:
                if inner.module not in self._inner_modules:
                    self._inner_modules[inner.module] = modules[inner.module]
                    if call.unit in own or inner.module not in called:
                        wrap_forward(modules[inner.module], self._inner, inner.module)
        for call in self._calls:
            if call.unit not in own and hasattr(modules[call.unit], "gradient_checkpointing"):
                modules[call.unit].gradient_checkpointing = False
        wrap_forward(self._model, self._forward)

    def _forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._run is not None:  # the model calls itself
            return forward(*args, **kwargs)
        self._check_mode()
        received, args = self._accept(args)
        shapes = self._checks.check(args, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in self._unneeded}
        run = self._run = Run(received, [*received.values(), *tensors_of((args, kwargs))])
        run.dtypes = {leaf.dtype: value.dtype for leaf, value in zip(self._leaves, received.values(), strict=True)}
        run.shapes, run.seen_tokens = shapes, seen_tokens(kwargs)
        try:
            if self._plan.stage:
                args = self._dummies.inputs(run)
            result = forward(*args, **kwargs)
        except _Stop:
            result = None
        except SplitError:
            raise
        except Exception as error:
            error.add_note(_NOTE.format(self._plan.stage))
            raise
        finally:
            self._run = None
        return result if self._plan.stage == self._plan.stages - 1 else self._results(run, args)

    def _accept(self, args: tuple[Any, ...]) -> tuple[dict[Source, torch.Tensor], tuple[Any, ...]]:
        """Return the received values by source, and the model's own arguments."""
        if not self._plan.stage:
            return {}, args
        if len(args) != len(self._received):
            raise SplitError(
                f"stage {self._plan.stage} takes {len(self._received)} values from other stages "
                f"({', '.join(name_of(self._plan.record, value) for value in self._received)}), got {len(args)}"
            )
        # What is changed in place must not be the received tensor itself.
        values = [
            value.clone() if one in self._changed else value for one, value in zip(self._received, args, strict=True)
        ]
        return dict(zip(self._received, values, strict=True)), ()

    def _check_mode(self) -> None:
        if self._plan.record.is_eval_only and self._model.training:
            raise SplitError(
                "the model was examined in eval mode, since it could not run the example in training mode; to train "
                "it, call model.train() and split it with an example that it can be trained on"
            )

    def _call(self, forward: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit of this stage, or stand in for another one."""
        run = self._run
        if run is None or run.is_inside:
            return forward(*args, **kwargs)
        number = run.next_call
        self._check_order(number, name)
        found = leaves_by_path(args, kwargs)
        given = [found.get(path) for path in self._calls[number].given] if number < len(self._calls) else []
        self._exchange_arguments(run, number, given)
        if number >= self._end:
            raise _Stop
        run.next_call += 1
        if self._plan.flow.stages[number] != self._plan.stage:
            return self._stand_in(run, number, given)
        run.is_inside = True
        try:
            result = forward(*args, **kwargs)
        finally:
            run.is_inside = False
        self._result_checks.check(number, given, result, run.sized(given))
        if number in self._returning:
            for leaf, tensor in enumerate(pytree.tree_leaves(result)):
                self._capture(run, Source(OUTPUT, number, leaf), tensor)
        return result

    def _check_order(self, number: int, name: str) -> None:
        expected = self._calls[number].unit if number < len(self._calls) else "nothing more"
        if expected != name:
            raise SplitError(
                f"the model calls {name!r} where the probe has recorded {expected!r}; {_AGAIN}, in the same mode",
                unit=name,
            )

    def _exchange_arguments(self, run: Run, number: int, given: list[Any]) -> None:
        """Take the arguments that are to be sent, and overwrite those that were received."""
        for argument in self._calls[number].arguments:
            source = Source(ARGUMENT, number, argument.leaf)
            if source in self._sent:
                self._capture(run, source, given[argument.leaf])
            elif source in run.received and isinstance(given[argument.leaf], torch.Tensor):
                self._overwrite(run, number, given[argument.leaf], run.received[source])

    def _overwrite(self, run: Run, number: int, dummy: torch.Tensor, value: torch.Tensor) -> None:
        if dummy.shape != value.shape or dummy.dtype != value.dtype:
            raise SplitError(
                f"stage {self._plan.stage} received {dtype_name(value)}{list(value.shape)} for the input of "
                f"{self._calls[number].unit!r}, but the code around it has {dtype_name(dummy)}{list(dummy.shape)}",
                unit=self._calls[number].unit,
            )
        # A checkpoint around the unit has saved the dummy for its backward, and must find the received value there.
        saved = nullcontext() if dummy.is_inference() else _unsafe_preserve_version_counter(dummy)
        with saved:
            if dummy.requires_grad and not dummy._is_view():
                dummy.detach_()
            dummy.copy_(value)
        run.dummies.pop(id(dummy), None)

    def _capture(self, run: Run, source: Source, value: Any) -> None:
        if source not in self._sent:
            return
        name = name_of(self._plan.record, source)
        if not isinstance(value, torch.Tensor):
            raise SplitError(
                f"{name} is a {type(value).__name__} now, but was a tensor in the probe; {_AGAIN}", unit=name
            )
        if value.requires_grad and not leaf_of(self._plan.record, source).gradient:
            raise SplitError(
                f"{name} requires a gradient now, but did not in the probe (were parameters frozen then?); split the "
                "model again",
                unit=name,
            )
        run.captured[source] = value.clone() if source in self._changed else value
        run.versions[source] = _version(run.captured[source])

    def _stand_in(self, run: Run, number: int, given: list[Any]) -> Any:
        """Return what a unit of another stage would: received values, arguments it passes through, and dummies."""
        call = self._calls[number]
        self._show_inner(run, number, call, given)
        leaves = [
            run.received[source]
            if (source := Source(OUTPUT, number, position)) in run.received
            else self._dummies.leaf(run, leaf, given, call.unit)
            for position, leaf in enumerate(call.value.leaves)
        ]
        return call.value.build(leaves)

    def _inner(self, forward: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take what a module inside a unit of this stage returns."""
        run = self._run
        result = forward(*args, **kwargs)
        if run is None or not run.is_inside:
            return result
        number = run.next_call - 1
        count = run.inner_count[number, name] = run.inner_count.get((number, name), -1) + 1
        for position, inner in enumerate(self._calls[number].inner):
            for module, occurrence, leaf in inner.places[:1]:
                if module == name and occurrence == count:
                    tensor = pytree.tree_leaves(result)[leaf]
                    self._capture(run, Source(INNER, number, position), tensor)
        return result

    def _show_inner(self, run: Run, number: int, call: Call, given: Sequence[Any]) -> None:
        """Call the modules whose outputs were received, so that hooks see these outputs."""
        received = {
            place: run.received[source]
            for position, inner in enumerate(call.inner)
            if (source := Source(INNER, number, position)) in run.received
            for place in inner.places
        }
        for inner_call in call.inner_calls:
            leaves = [
                received.get((inner_call.module, inner_call.number, position), _MISSING)
                for position in range(len(inner_call.value.leaves))
            ]
            if all(leaf is _MISSING for leaf in leaves):
                continue
            filled = [
                self._dummies.leaf(run, inner_call.value.leaves[position], given, call.unit)
                if leaf is _MISSING
                else leaf
                for position, leaf in enumerate(leaves)
            ]
            _call_with_result(self._inner_modules[inner_call.module], inner_call.value.build(filled))

    def _results(self, run: Run, args: tuple[Any, ...]) -> Any:
        """Return the values to send, in order."""
        values: dict[Source, torch.Tensor] = {}
        for source in self._returned:
            if source.kind == INPUT:
                values[source] = tensors_of(args[source.call])[source.leaf]
            elif source not in run.captured:
                raise SplitError(
                    f"stage {self._plan.stage} has run without computing {name_of(self._plan.record, source)}; {_AGAIN}"
                )
            else:
                values[source] = self._unchanged(run, source)
        self._checks.check_sent(values, run.shapes)
        return next(iter(values.values())) if len(values) == 1 else tuple(values.values())

    def _unchanged(self, run: Run, source: Source) -> torch.Tensor:
        value = run.captured[source]
        if _version(value) != run.versions[source]:
            name = name_of(self._plan.record, source)
            raise SplitError(f"{name} was changed in place before it could be sent, unlike in the probe; {_AGAIN}")
        return value


_MISSING: Final = object()


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; in inference mode torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _call_with_result(module: nn.Module, result: Any) -> None:
    """Call a module that returns this result, for the sake of its hooks."""
    forward = module.forward
    module.forward = lambda: result
    try:
        module()
    finally:
        module.forward = forward


def _optional(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a forward that are None unless given."""
    parameters = inspect.signature(model.forward).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.default is None)
