"""Probes a model: one forward that finds what its units take from each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from penstock.errors import SplitError
from penstock.execution.preserved_state import preserved_state
from penstock.models.glue_writes import GlueWrites
from penstock.models.record import (
    ARGUMENT,
    INNER,
    INPUT,
    INSIDE,
    OUTPUT,
    PARAMETER,
    RANDOM,
    Argument,
    Call,
    Inner,
    InnerCall,
    Record,
    Source,
    Value,
)
from penstock.models.sources import Sources, SourceTracker, wrap_forward
from penstock.models.values import (
    describe_keyword,
    describe_leaf,
    describe_tensor_leaf,
    describe_value,
    flatten,
    leaves_by_path,
    tensors_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.models.units import Units

#: Values of these kinds are computed on a stage, and may be sent to others.
COMPUTED: Final = frozenset({OUTPUT, ARGUMENT, INNER})
#: How many references there are to a tensor of a result in ``_is_stored``, unless it is stored elsewhere too.
_OF_A_RESULT: Final = 5


def probe(model: nn.Module, units: Units, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """Run one forward of a model and record what its units take and return.

    Args:
        model: the model, which is changed: pass a copy that shares its tensors.
        units: the units of that copy.
        args: the positional arguments of the forward.
        kwargs: its keyword arguments.
    """
    try:
        return _Probe(model, units).run(args, kwargs)
    except SplitError:
        raise
    except Exception as error:
        raise SplitError(f"the model failed on the example: {type(error).__name__}: {error}") from error


@dataclass
class _InnerValue:
    places: list[tuple[str, int, int]]
    tensor: torch.Tensor


@dataclass
class _Call:
    """A call while it runs, and what is known of it later."""

    unit: str
    is_glue: bool
    paths: tuple[str, ...]
    given: list[Any]
    feeds: set[Source]
    arguments: list[Argument] = field(default_factory=list)
    value: Value = field(default_factory=lambda: Value("", ()))
    inner: list[_InnerValue] = field(default_factory=list)
    inner_calls: dict[tuple[str, int], Any] = field(default_factory=dict)
    inner_count: Counter[str] = field(default_factory=Counter)


class _Probe:
    def __init__(self, model: nn.Module, units: Units) -> None:
        self._model = model
        self._units = units
        self._tracker = SourceTracker()
        self._calls: list[_Call] = []
        self._random_glue: set[str] = set()
        self._storing: set[int] = set()
        self._install()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        """Run the forward; once more if glue modules turn out to draw random numbers, whose outputs are sources too."""
        known = -1
        while known < len(self._random_glue):
            known = len(self._random_glue)
            self._tracker = SourceTracker()
            self._calls = []
            # Each input gets memory of its own, even if the same ids are also the labels.
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            self._mark(args, kwargs)
            writes = GlueWrites(self._model, self._units, self._tracker)
            device = next((tensor.device for tensor in tensors_of((args, kwargs))), torch.device("cpu"))
            with preserved_state(self._model, device), self._tracker, torch.enable_grad():
                result = self._model(*args, **kwargs)
                writes.check()
                self._check_calls()
                self._feed_decisions()
                found = self._union(tensors_of(result)) | self._tracker.decisions
        return self._record(found, args, kwargs)

    def _check_calls(self) -> None:
        if all(call.is_glue for call in self._calls):
            raise SplitError(
                "the forward calls none of the model's modules; if it was replaced by a function that calls the old "
                "one, override it in a subclass instead"
            )

    def _install(self) -> None:
        seen: set[nn.Module] = set()
        for kind, around in (("units", self._unit), ("glue", self._glue), ("containers", self._container)):
            for name, module in getattr(self._units, kind).items():
                seen.add(module)
                wrap_forward(module, around, name, module)
        for unit, module in self._units.units.items():
            for name, part in module.named_modules():
                if part not in seen:
                    seen.add(part)
                    wrap_forward(part, self._inner, f"{unit}.{name}")

    def _mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the parameters, the buffers of units, and the inputs."""
        placed = {id(part) for module in self._units.units.values() for part in module.modules()}
        for name, module in self._model.named_modules():
            held = [*module._parameters.items(), *(module._buffers.items() if id(module) in placed else ())]
            for short, tensor in held:
                if tensor is not None and not self._tracker.of(tensor):
                    full = f"{name}.{short}" if name else short
                    self._tracker.mark(tensor, {Source(PARAMETER, name=full)})
        for number, value in enumerate(args):
            for leaf, tensor in enumerate(tensors_of(value)):
                self._tracker.mark(tensor, {Source(INPUT, number, leaf, f"args[{number}]")})
        for name, value in kwargs.items():
            for leaf, tensor in enumerate(tensors_of(value)):
                self._tracker.mark(tensor, {Source(INPUT, -1, leaf, name)})

    def _container(
        self, forward: Callable[..., Any], name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._tracker.glue.append(name)
        try:
            return forward(*args, **kwargs)
        finally:
            self._tracker.glue.pop()

    def _glue(
        self, forward: Callable[..., Any], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._tracker.call is not None:
            return forward(*args, **kwargs)
        if isinstance(module, _DropoutNd) or name in self._random_glue:
            return self._called(forward, name, True, args, kwargs)
        drawn = len(self._tracker.draws)
        result = self._container(forward, name, module, args, kwargs)
        if len(self._tracker.draws) > drawn:
            self._random_glue.add(name)
        return result

    def _unit(
        self, forward: Callable[..., Any], name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._tracker.call is not None:  # it is also part of the unit that is running
            return self._inner(forward, name, args, kwargs)
        return self._called(forward, name, False, args, kwargs)

    def _called(
        self, forward: Callable[..., Any], name: str, is_glue: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tracker, number = self._tracker, len(self._calls)
        tracker.checkpoints.enter(number, name)
        self._feed_decisions()
        found = leaves_by_path(args, kwargs).items()
        given = {path: leaf for path, leaf in found if isinstance(leaf, torch.Tensor) or type(leaf) is int}
        call = _Call(name, is_glue, tuple(given), list(given.values()), set(tracker.decisions))
        self._calls.append(call)
        for leaf, tensor in enumerate(call.given):
            if isinstance(tensor, torch.Tensor):
                self._enter(call, number, leaf, tensor)
        known = frozenset().union(*(tracker.of(leaf) for leaf in call.given if isinstance(leaf, torch.Tensor)))
        tracker.call = number
        try:
            result = forward(*args, **kwargs)
        finally:
            tracker.call = None
        call.feeds |= {self._as_found(source, known) for source in tracker.reads.get(number, set())}
        if any(_is_stored(leaf) for leaf in pytree.tree_leaves(result)):
            self._storing.add(number)
        return self._leave(call, number, result)

    def _as_found(self, source: Source, known: Sources) -> Source:
        """Return what a call has read; a value that is not in its arguments may be one that another unit has stored."""
        is_stored = source.kind == OUTPUT and source.call in self._storing and source not in known
        return Source(INSIDE, source.call) if is_stored else source

    def _feed_decisions(self) -> None:
        """Let the latest call need what glue has read behind it: its stage still runs that glue."""
        latest = len(self._calls) - 1
        if latest >= 0:
            self._calls[latest].feeds |= {
                source
                for source in self._tracker.decisions
                if source.kind in (INPUT, PARAMETER) or (source.kind != RANDOM and source.call < latest)
            }

    def _enter(self, call: _Call, number: int, leaf: int, tensor: torch.Tensor) -> None:
        """Note what an argument was computed from; with several sources, it becomes a source itself.

        So it does if random numbers went into it: it must be computed on one stage only.
        """
        sources = self._tracker.of(tensor)
        computed = sum(source.kind in COMPUTED for source in sources)
        is_random = any(source.kind == RANDOM for source in sources)
        if computed + is_random > 1 and computed and _fills_its_memory(tensor):
            sources |= self._tracker.decisions
            call.arguments.append(Argument(leaf, _sorted(sources), describe_tensor_leaf(tensor), tensor._is_view()))
            sources = frozenset({Source(ARGUMENT, number, leaf)})
            self._tracker.mark(tensor, sources)
        call.feeds |= sources

    def _leave(self, call: _Call, number: int, result: Any) -> Any:
        """Describe what a call returns, and make each tensor of it a source."""
        leaves, spec = flatten(result, call.unit)
        given = {id(tensor): position for position, tensor in reversed(list(enumerate(call.given)))}
        own = {size for one in self._units.units.get(call.unit, nn.Module()).parameters() for size in one.shape}
        described, memories = [], set()
        for position, leaf in enumerate(leaves):
            sources = self._tracker.of(leaf) if isinstance(leaf, torch.Tensor) else frozenset()
            passed = given.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            if passed is not None and (Source(INSIDE, number) in sources or self._is_dropout(call)):
                passed = None  # it was changed in place, or will be another one with other random numbers
            described.append(describe_leaf(leaf, call.given, passed, own))
            if not isinstance(leaf, torch.Tensor) or passed is not None:
                continue
            if not _is_new(sources, number) or self._tracker.number_memory(leaf) in memories:
                leaves[position] = leaf = leaf.clone()
            memories.add(self._tracker.number_memory(leaf))
            self._tracker.mark(leaf, {Source(OUTPUT, number, position)})
        call.value = Value(spec, tuple(described))
        return call.value.build(leaves)

    def _is_dropout(self, call: _Call) -> bool:
        """Return whether a call draws random numbers in training mode, even if it has drawn none here."""
        return call.is_glue and getattr(self._units.glue[call.unit], "p", 1) != 0

    def _inner(self, forward: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark what a module in a unit returns: hooks may hand it to glue."""
        result = forward(*args, **kwargs)
        number = self._tracker.call
        if number is None:
            return result
        call = self._calls[number]
        place = (name, call.inner_count[name])
        call.inner_count[name] += 1
        call.inner_calls[place] = result
        for position, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self._mark_inner(call, number, (*place, position), leaf)
        return result

    def _mark_inner(self, call: _Call, number: int, place: tuple[str, int, int], tensor: torch.Tensor) -> None:
        sources = self._tracker.of(tensor)
        if sources == {Source(INSIDE, number)}:
            self._tracker.mark(tensor, {Source(INNER, number, len(call.inner))})
            call.inner.append(_InnerValue([place], tensor))
        elif len(sources) == 1 and (source := next(iter(sources))).kind == INNER and source.call == number:
            call.inner[source.leaf].places.append(place)

    def _union(self, tensors: Iterable[torch.Tensor]) -> Sources:
        return frozenset().union(*(self._tracker.of(tensor) for tensor in tensors))

    def _record(self, result: Sources, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        needed = {source for call in self._calls for source in _sources_of(call)} | result
        numbers = {
            source: position
            for call in range(len(self._calls))
            for position, source in enumerate(_sorted(s for s in needed if s.kind == INNER and s.call == call))
        }

        def renumber(sources: Iterable[Source]) -> tuple[Source, ...]:
            return _sorted(source._replace(leaf=numbers.get(source, source.leaf)) for source in sources)

        own = {name: _own_parameters(module) for name, module in self._units.units.items()}
        names = {id(tensor): name for name, tensor in _tensors_by_name(self._model)}
        calls = [
            _finished(call, number, renumber, {names[key] for key in own.get(call.unit, ()) if key in names}, numbers)
            for number, call in enumerate(self._calls)
        ]
        return Record(
            tuple(calls),
            renumber(result),
            tuple(describe_value(value, (), f"args[{number}]") for number, value in enumerate(args)),
            tuple(kwargs),
            tuple(describe_keyword(name, value) for name, value in kwargs.items()),
            tuple(self._tracker.draws),
            self._tracker.is_random,
            renumber(source for source in self._tracker.changed if source.kind in COMPUTED or source.kind == INPUT),
            self._tracker.checkpoints.found(),
        )


def _finished(
    call: _Call,
    number: int,
    renumber: Callable[[Iterable[Source]], tuple[Source, ...]],
    own: set[str],
    numbers: dict[Source, int],
) -> Call:
    kept = [call.inner[source.leaf] for source in sorted(numbers) if source.call == number]
    places = {place[:2] for value in kept for place in value.places}
    return Call(
        call.unit,
        call.is_glue,
        call.value,
        renumber(source for source in call.feeds if not (source.kind == PARAMETER and source.name in own)),
        tuple(argument._replace(sources=renumber(argument.sources)) for argument in call.arguments),
        tuple(Inner(tuple(value.places), describe_tensor_leaf(value.tensor, call.given)) for value in kept),
        tuple(
            InnerCall(*place, describe_value(result, call.given, place[0]))
            for place, result in call.inner_calls.items()
            if place in places
        ),
        call.paths,
    )


def _sources_of(call: _Call) -> set[Source]:
    return call.feeds.union(*(argument.sources for argument in call.arguments))


def _sorted(sources: Iterable[Source]) -> tuple[Source, ...]:
    return tuple(sorted(sources))


def _is_new(sources: Sources, number: int) -> bool:
    """Return whether a tensor was computed in this call, in memory of its own."""
    return bool(sources) and all(source.kind in (INSIDE, INNER) and source.call == number for source in sources)


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all there is in its memory, so that overwriting it leaves nothing behind."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _own_parameters(module: nn.Module) -> set[int]:
    return {id(tensor) for _, tensor in _tensors_by_name(module)}


def _tensors_by_name(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return every parameter and buffer with its first name."""
    return [*module.named_parameters(), *module.named_buffers()]


def _is_stored(leaf: Any) -> bool:
    """Return whether anything but the result of a call refers to a tensor of it."""
    return isinstance(leaf, torch.Tensor) and getrefcount(leaf) > _OF_A_RESULT
