"""Derives from a record and a layout what the stages send each other, and which parameters each of them needs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.errors import SplitError
from penstock.ir.edges import Edge
from penstock.models.record import ARGUMENT, INNER, INPUT, INSIDE, OUTPUT, PARAMETER, RANDOM, Leaf, Record, Source

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_RESULT: Final = "the output of the model"
#: Arguments that are computed from each other, beyond this many, are sent as a whole.
_DEEPEST: Final = 40

#: Values to be sent, each with its target and its number of elements.
_Pairs: TypeAlias = dict[tuple[Source, int], int]


class Flow(NamedTuple):
    """What stages exchange.

    Attributes:
        edges: what is sent, sorted by source.
        values: where the value of each edge comes from.
        stages: the stage of each call.
        parameters: the stages that need a parameter beyond those of their units, by its name.
    """

    edges: tuple[Edge, ...]
    values: tuple[Source, ...]
    stages: tuple[int, ...]
    parameters: dict[str, tuple[int, ...]]


def find_flow(record: Record, layout: Sequence[Sequence[str]], listed: Collection[str] = ()) -> Flow:
    """Find what the stages of a layout send each other.

    Args:
        record: what the units take and return.
        layout: the units of each stage.
        listed: units that are elements of lists, which must not be called on several stages.
    """
    homes = {unit: stage for stage, units in enumerate(layout) for unit in units}
    needs = _Needs(record)
    _place_calls(needs, homes, listed)
    stages = tuple(needs.stages)
    _check_opaque(record, stages, len(layout))
    for number, call in enumerate(record.calls):
        for source in call.feeds:
            needs.need(source, stages[number], repr(call.unit))
    for source in record.result:
        needs.need(source, len(layout) - 1, _RESULT)
    _check_draws(record, needs.draws)
    values = sorted(needs.sent, key=lambda source: (needs.origin(source), _position(source)))
    edges = tuple(
        Edge(
            needs.origin(source),
            tuple(sorted(needs.sent[source])),
            name_of(record, source),
            has_gradient(record, source),
        )
        for source in values
    )
    _check_checkpoints(record, stages, values)
    parameters = {name: tuple(sorted(users)) for name, users in sorted(needs.parameters.items())}
    return Flow(edges, tuple(values), stages, parameters)


def leaf_of(record: Record, source: Source) -> Leaf:
    """Return what a value is."""
    if source.kind == INPUT:
        return [leaf for leaf in record.positional[source.call].leaves if leaf.kind == "tensor"][source.leaf]
    call = record.calls[source.call]
    if source.kind == OUTPUT:
        return call.value.leaves[source.leaf]
    if source.kind == INNER:
        return call.inner[source.leaf].tensor
    return next(argument.tensor for argument in call.arguments if argument.leaf == source.leaf)


def is_view(record: Record, argument: Source) -> bool:
    """Return whether an argument of a call is a view of another tensor."""
    return next(one.is_view for one in record.calls[argument.call].arguments if one.leaf == argument.leaf)


def has_gradient(record: Record, source: Source) -> bool:
    """Return whether a gradient goes back to a value."""
    return leaf_of(record, source).gradient


def name_of(record: Record, source: Source) -> str:
    """Name a value, for people."""
    if source.kind == INPUT:
        return source.name
    call = record.calls[source.call]
    again = sum(other.unit == call.unit for other in record.calls[: source.call])
    unit = f"{call.unit}, call {again + 1}" if again else call.unit
    if source.kind == ARGUMENT:
        return f"input of {unit}"
    if source.kind == INNER:
        return call.inner[source.leaf].places[0][0]
    return unit if len(call.value.leaves) == 1 else f"{unit}[{source.leaf}]"


@dataclass
class _Needs:
    """What each stage needs from others."""

    record: Record
    stages: list[int] = field(default_factory=list)
    sent: dict[Source, set[int]] = field(default_factory=lambda: defaultdict(set))
    parameters: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    draws: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _latest: dict[Source, int] = field(default_factory=dict)
    _known: set[tuple[Source, int]] = field(default_factory=set)
    _planned: dict[tuple[Source, int], _Pairs] = field(default_factory=dict)

    def need(self, source: Source, stage: int, consumer: str) -> None:
        """Note that a stage needs a value, and everything it is computed from there."""
        todo = [(source, stage)]
        while todo:
            key = todo.pop()
            if key not in self._known:
                self._known.add(key)
                todo += self._need(*key, consumer)

    def origin(self, source: Source) -> int:
        """Return the stage that sends a value."""
        return 0 if source.kind == INPUT else self.latest(source)

    def latest(self, source: Source) -> int:
        """Return the last stage that a value comes from; -1 if it comes from inputs and parameters alone."""
        if source.kind in (OUTPUT, INNER, INSIDE):
            return self.stages[source.call]
        if source.kind != ARGUMENT:
            return -1
        if source not in self._latest:
            self._latest[source] = max(map(self.latest, _computed_from(self.record, source)))
        return self._latest[source]

    def _need(self, source: Source, stage: int, consumer: str) -> Iterable[tuple[Source, int]]:
        if source.kind == PARAMETER:
            self.parameters[source.name].add(stage)
        elif source.kind == RANDOM:
            self.draws[source.call].add(stage)
        elif source.kind == INPUT:
            if source.call >= 0 and stage > 0:
                self.sent[source].add(stage)
        elif source.kind == ARGUMENT:
            return self._need_argument(source, stage)
        else:
            self._need_result(source, stage, consumer)
        return ()

    def _need_argument(self, source: Source, stage: int) -> list[tuple[Source, int]]:
        """Receive the argument as a whole, or compute it here from what it was computed from: whichever sends less."""
        self._planned.clear()
        whole, _ = self._options(source, stage)
        place = stage
        if whole is not None:
            self.sent[source].add(stage)
            place = self.latest(source)
        return [(part, place) for part in _computed_from(self.record, source)]

    def _options(self, source: Source, stage: int, depth: int = 0) -> tuple[_Pairs | None, _Pairs]:
        """Return what has to be sent for an argument as a whole, None if that is not better; and for its parts."""
        place, parts = self.latest(source), _computed_from(self.record, source)
        separately: _Pairs = {}
        for part in parts if depth < _DEEPEST else ():
            separately |= self._plan(part, stage, depth + 1)
        if not 0 <= place < stage:
            return None, separately
        whole = {(source, stage): self._size(source)}
        for part in parts:
            whole |= self._plan(part, place, depth + 1)
        must_be_whole = depth >= _DEEPEST or any(part.kind == RANDOM for part in parts)
        is_better = must_be_whole or sum(whole.values()) < sum(separately.values())
        return (whole if is_better else None), separately

    def _plan(self, source: Source, stage: int, depth: int) -> _Pairs:
        """Return what has to be sent, beyond what already is, for a stage to have a value."""
        if (source, stage) in self._known:
            return {}
        if source.kind == ARGUMENT:
            if (source, stage) not in self._planned:
                whole, separately = self._options(source, stage, depth)
                self._planned[source, stage] = separately if whole is None else whole
            return self._planned[source, stage]
        is_sent = source.kind in (OUTPUT, INNER) and self.stages[source.call] < stage
        if is_sent or (source.kind == INPUT and source.call >= 0 and stage > 0):
            return {(source, stage): self._size(source)}
        return {}

    def _size(self, source: Source) -> int:
        return prod(leaf_of(self.record, source).size)

    def _need_result(self, source: Source, stage: int, consumer: str) -> None:
        unit, place = self.record.calls[source.call].unit, self.stages[source.call]
        if place == stage:
            return
        if source.kind == INSIDE:
            raise SplitError(
                f"{consumer} on stage {stage} reads a value that {unit!r} on stage {place} has stored instead of "
                "returning it, for example in a dictionary that layers share; keep the two on one stage",
                unit=unit,
            )
        if place > stage:
            raise SplitError(
                f"an edge would go backwards: {consumer} on stage {stage} needs what {unit!r} on stage {place} "
                f"returns; put {unit!r} on stage {stage} or an earlier one",
                unit=unit,
            )
        self.sent[source].add(stage)


def _computed_from(record: Record, source: Source) -> tuple[Source, ...]:
    return next(one.sources for one in record.calls[source.call].arguments if one.leaf == source.leaf)


def _place_calls(needs: _Needs, homes: Mapping[str, int], listed: Collection[str]) -> None:
    """Give each call a stage: that of its unit; a later one if it is called again with what comes from there."""
    record = needs.record
    called: set[str] = set()
    for number, call in enumerate(record.calls):
        latest = max(map(needs.latest, _inputs_of(record, number)), default=-1)
        if call.is_glue:
            needs.stages.append(latest if latest >= 0 else _next_stage(record, number, homes))
        elif latest > homes[call.unit] and call.unit in called:
            if call.unit in listed:
                raise SplitError(
                    f"{call.unit!r} is called in a loop: again after units of stage {latest} have run, while it is on "
                    f"stage {homes[call.unit]}; keep what the loop calls on one stage",
                    unit=call.unit,
                )
            needs.stages.append(latest)
        else:
            needs.stages.append(homes[call.unit])
        called.add(call.unit)


def _inputs_of(record: Record, number: int) -> list[Source]:
    """Return what a call takes, its own arguments resolved into what these were computed from."""
    call = record.calls[number]
    own = [source for argument in call.arguments for source in argument.sources]
    return own + [source for source in call.feeds if not (source.kind == ARGUMENT and source.call == number)]


def _next_stage(record: Record, number: int, homes: Mapping[str, int]) -> int:
    return next((homes[call.unit] for call in record.calls[number:] if not call.is_glue), 0)


def _check_draws(record: Record, draws: Mapping[int, set[int]]) -> None:
    for number, users in draws.items():
        if len(users) > 1:
            owner = record.draws[number] or "the model"
            raise SplitError(
                f"the forward of {owner} draws random numbers that stages {', '.join(map(str, sorted(users)))} need, "
                "and each would draw its own; draw them in a module, e.g. nn.Dropout instead of functional.dropout",
                unit=record.draws[number],
            )


def _check_checkpoints(record: Record, stages: Sequence[int], values: Collection[Source]) -> None:
    """Refuse checkpoints that a backward cannot run again on one stage."""
    for checkpoint in record.checkpoints:
        first, *others = checkpoint.calls
        unit = record.calls[first].unit
        for number in others:
            if stages[number] != stages[first]:
                raise SplitError(
                    f"one checkpoint is around {unit!r} on stage {stages[first]} and {record.calls[number].unit!r} on "
                    f"stage {stages[number]}; keep what it is around on one stage, or checkpoint each layer",
                    unit=unit,
                )
        sent = next((v for v in values if v.kind in (OUTPUT, INNER) and v.call in checkpoint.calls), None)
        if sent is not None and (checkpoint.has_tail or sent.call != checkpoint.calls[-1]):
            raise SplitError(
                f"{record.calls[sent.call].unit!r} is sent to another stage, but more is computed from it in the "
                "checkpoint around it; checkpoint the layer alone, or keep the next layer on this stage, too",
                unit=record.calls[sent.call].unit,
            )


def _check_opaque(record: Record, stages: Sequence[int], count: int) -> None:
    for call, stage in zip(record.calls, stages, strict=True):
        for leaf in call.value.leaves:
            if leaf.kind == "opaque" and stage < count - 1:
                raise SplitError(
                    f"{call.unit!r} on stage {stage} returns a {leaf.value}, which later stages cannot rebuild; return "
                    "tensors in tuples, lists or dicts",
                    unit=call.unit,
                )


def _position(source: Source) -> tuple[int, int, int]:
    """Order values as they are computed."""
    return source.call, (INPUT, ARGUMENT, INNER, OUTPUT).index(source.kind), source.leaf
