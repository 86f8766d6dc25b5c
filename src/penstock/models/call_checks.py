"""Refuses calls of a stage that differ from the probe's, since then other values may be needed elsewhere.

Sizes may change where every stage can follow them. Each microbatch costs comparisons of whole numbers and types only.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from penstock.errors import SplitError
from penstock.models.edges import leaf_of, name_of
from penstock.models.generation import stage_cache
from penstock.models.inputs import free_keywords
from penstock.models.record import INPUT, OUTPUT, Leaf, Source
from penstock.models.values import actual_shape, actual_size, describe_shape, find_mismatch, leaves_by_path, tensors_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from penstock.models.plan import Plan

#: Keyword arguments that change what the forward returns, not what it computes.
_HARMLESS: Final = frozenset({"return_dict"})
#: What may be switched off in a call, whatever the configuration says: less is returned.
_EXTRAS: Final = ("output_", "use_cache")
#: What a stage may be called with beside a cache of its own: it saves work, and only the head sees it.
_WITH_CACHE: Final = frozenset({stage_cache.CACHE, "use_cache", "logits_to_keep"})
_AGAIN: Final = "split the model again with example=(args, kwargs) like this call"
_AS_KEYWORD: Final = "pass it by keyword, in the example as well, so that every stage gets it"

#: Shapes of the tensors in the positional inputs: by the number of the input and that of the tensor in it.
Shapes = dict[tuple[int, int], "Sequence[int]"]


class _Size(NamedTuple):
    """A size of a positional input that a later stage derives from a value that this stage sends."""

    place: tuple[int, int]
    dimension: int
    rule: tuple[int, ...]
    source: Source
    target: int


def input_rules(plan: Plan) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
    """Return how a later stage derives the shapes of positional inputs from those of the values it receives."""
    known = [torch.empty(leaf_of(plan.record, source).size, device="meta") for source in plan.received]
    return {
        place: describe_shape(leaf.size, known)
        for place, leaf in _input_leaves(plan).items()
        if _input_source(place) not in plan.received
    }


class CallChecks:
    """Checks the arguments of a stage, and the shapes that later stages derive from what it sends."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan = plan
        parameters = inspect.signature(model.forward).parameters.values()
        self._defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
        names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        count = len(plan.record.positional)
        self._positional, self._by_keyword = names[:count], names[count:]
        keywords = zip(plan.record.keywords, plan.record.keyword_leaves, strict=True)
        self._expected = {name: dict(leaves) for name, leaves in keywords}
        unneeded = {name for name in plan.unneeded if self._defaults.get(name, "") is None}
        self._ignored = _HARMLESS | free_keywords(model) | unneeded
        fed = {source.name for call in plan.record.calls for source in call.all_feeds}
        self._may_be_missing = self._ignored | (frozenset(self._expected) - fed)
        self._fixed: list[tuple[tuple[int, int], int, int]] = []
        self._followed: list[_Size] = []
        self._leaves = _input_leaves(plan)
        for stage in range(plan.stage + 1, plan.stages):
            self._add_sizes(plan._replace(stage=stage))

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes:
        """Refuse arguments that are not like those of the example; return the shapes of positional inputs, if known."""
        ignored = self._ignored | _WITH_CACHE if stage_cache.is_given(kwargs) else self._ignored
        for name, value in kwargs.items():
            if name not in ignored and not (value is False and name.startswith(_EXTRAS)):
                self._check_keyword(name, value)
        shapes = {} if self._plan.stage else self._check_positional(args)
        for name, expected in self._expected.items():
            if name in kwargs or name in ignored:
                continue
            has_tensor = any(leaf.kind == "tensor" for leaf in expected.values())
            if not (has_tensor and name in self._may_be_missing):
                self._check_keyword(name, self._defaults.get(name))
        return shapes

    def _check_keyword(self, name: str, value: Any) -> None:
        if name in self._positional:
            position = self._positional.index(name)
            raise SplitError(
                f"{name!r} was positional argument {position} of the example, but is a keyword argument now; pass it "
                f"by position, or split the model again with an example that has {name}=",
                unit=name,
            )
        if name == stage_cache.CACHE and name not in self._expected and value is not None:
            raise SplitError(
                f"{name}= holds all layers, but those of other stages would stay empty in it, and masks would be "
                "wrong; to generate tokens, call generate() of a pipeline, which keeps a cache on each stage",
                unit=name,
            )
        if name not in self._expected:
            if not _is_same(value, self._defaults.get(name)):
                raise SplitError(
                    f"the keyword argument {name}={_brief(value)} was not part of the example that the model was split "
                    f"with; {_AGAIN}",
                    unit=name,
                )
            return
        expected, found = self._expected[name], leaves_by_path((), {name: value})
        if expected.keys() != found.keys():
            raise _differs(name, f"has {', '.join(expected)}", f"has {', '.join(found)}")
        for path, leaf in expected.items():
            if (mismatch := find_mismatch(leaf, found[path])) is not None:
                raise _differs(path, *mismatch, leaf)

    def _describe_count(self, found: int) -> str:
        """Describe a wrong number of positional arguments, with those that the example had by keyword."""
        had = len(self._plan.record.positional)
        more = self._by_keyword[: found - had] if found > had else []
        plural = "" if found == 1 else "s"
        text = f"the model is called with {found} positional argument{plural}, but its example had {had}"
        if more and all(name in self._expected for name in more):
            named = ", ".join(f"{name}=..." for name in more)
            return f"{text}; pass {named} by keyword, on every rank, or {_AGAIN}"
        return f"{text}; {_AGAIN}"

    def _check_positional(self, args: tuple[Any, ...]) -> Shapes:
        expected = self._plan.record.positional
        if len(args) != len(expected):
            raise SplitError(self._describe_count(len(args)))
        shapes: Shapes = {}
        for number, (value, argument) in enumerate(zip(expected, args, strict=True)):
            name = f"args[{number}]"
            leaves, spec = pytree.tree_flatten(argument)
            if value.structure != spec:
                raise _differs(name, f"is a {value.outermost}", f"is {_brief(argument)}")
            for leaf, one in zip(value.leaves, leaves, strict=True):
                if (mismatch := find_mismatch(leaf, one)) is not None:
                    raise _differs(name, *mismatch, leaf)
            shapes.update(((number, at), tensor.shape) for at, tensor in enumerate(tensors_of(argument)))
        for place, dimension, size in self._fixed:
            if shapes[place][dimension] != size:
                raise _differs(
                    f"args[{place[0]}]", f"has size {size} in dimension {dimension}", f"has {shapes[place][dimension]}"
                )
        return shapes

    def check_sent(self, values: Mapping[Source, torch.Tensor], shapes: Shapes) -> None:
        """Refuse values whose shapes make a later stage believe that a positional input has another shape."""
        for size in self._followed:
            value = values[size.source]
            expected = shapes[size.place][size.dimension]
            if actual_size((0, *size.rule), expected, [value]) != expected:
                name, source = f"args[{size.place[0]}]", name_of(self._plan.record, size.source)
                raise SplitError(
                    f"{name} has size {expected} in dimension {size.dimension}, which stage {size.target} cannot "
                    f"derive from {source}, whose shape is {list(value.shape)}; {_AS_KEYWORD}, or {_AGAIN}",
                    unit=name,
                )

    def _add_sizes(self, later: Plan) -> None:
        """Note which sizes of the positional inputs a later stage assumes."""
        sent = self._plan.sent
        for place, rules in input_rules(later).items():
            for dimension, rule in enumerate(rules):
                if len(rule) == 1:
                    if not self._plan.stage:
                        self._fixed.append((place, dimension, rule[0]))
                elif (source := later.received[rule[0]]) in sent:
                    self._followed.append(_Size(place, dimension, rule[1:], source, later.stage))


class ResultChecks:
    """Checks what the units of a stage return, wherever others rely on the record."""

    def __init__(self, plan: Plan) -> None:
        self._calls = plan.record.calls
        others = [plan._replace(stage=stage) for stage in range(plan.stages) if stage != plan.stage]
        ends = [(other.end, frozenset(other.received)) for other in others]
        #: The calls that other stages stand in for: for each tensor, whether its shape is derived there.
        self._watched: dict[int, tuple[bool, ...]] = {}
        for number, (call, stage) in enumerate(zip(self._calls, plan.flow.stages, strict=True)):
            users = [received for end, received in ends if end > number]
            if stage == plan.stage and users:
                self._watched[number] = tuple(
                    any(Source(OUTPUT, number, position) not in received for received in users)
                    for position in range(len(call.value.leaves))
                )

    def check(self, number: int, given: Sequence[Any], result: Any, sized: Sequence[Any]) -> None:
        """Refuse a result that is not what other stages take it for.

        Args:
            number: that of the call.
            given: its arguments.
            result: what it returned.
            sized: the arguments as others derive sizes from them.
        """
        if number not in self._watched:
            return
        call = self._calls[number]
        if not call.value.spec and call.value.leaves[0].kind == "tensor" and isinstance(result, torch.Tensor):
            self._check_tensor(call.unit, call.value.leaves[0], result, sized if self._watched[number][0] else None)
            return
        leaves, spec = pytree.tree_flatten(result)
        if call.value.structure != spec:
            raise _differs(f"what {call.unit} returns", f"is a {call.value.outermost}", f"is {_brief(result)}")
        for leaf, one, is_derived in zip(call.value.leaves, leaves, self._watched[number], strict=True):
            if leaf.kind == "passed":
                if one is not given[leaf.value]:
                    raise SplitError(
                        f"{call.unit!r} returned its argument as it was in the probe, but returns something else now; "
                        f"{_AGAIN}, in the same mode",
                        unit=call.unit,
                    )
            elif leaf.kind == "tensor":
                self._check_tensor(call.unit, leaf, one, sized if is_derived else None)
            elif (mismatch := find_mismatch(leaf, one)) is not None:
                raise SplitError(
                    f"what {call.unit!r} returns {mismatch[0]} in the probe, but {mismatch[1]} now, and other stages "
                    f"use the former; return it as a tensor, keep what reads it on the same stage, or {_AGAIN}",
                    unit=call.unit,
                )

    def _check_tensor(self, unit: str, leaf: Leaf, value: Any, sized: Sequence[Any] | None) -> None:
        if not isinstance(value, torch.Tensor):
            raise _differs(f"what {unit} returns", "was a tensor", f"is {_brief(value)}")
        if sized is None or list(value.shape) == (expected := actual_shape(leaf, sized)):
            return
        raise SplitError(
            f"{unit!r} returns a tensor of shape {list(value.shape)}, but other stages, to whom it is not sent, expect "
            f"{expected} because the probe had {list(leaf.size)}; {_AGAIN}",
            unit=unit,
        )


def _input_leaves(plan: Plan) -> dict[tuple[int, int], Leaf]:
    """Return the tensors of the positional inputs by their place."""
    return {
        (number, position): leaf
        for number, value in enumerate(plan.record.positional)
        for position, leaf in enumerate(leaf for leaf in value.leaves if leaf.kind == "tensor")
    }


def _input_source(place: tuple[int, int]) -> Source:
    return Source(INPUT, *place, f"args[{place[0]}]")


def _differs(name: str, recorded: str, given: str, leaf: Leaf | None = None) -> SplitError:
    unit = name.removeprefix("what ").removesuffix(" returns")
    advice = f"{_AS_KEYWORD}, or {_AGAIN}" if name.startswith("args[") else _AGAIN
    if leaf is not None and type(leaf.value) in (int, float):
        advice = f"make it a tensor if it changes from call to call, passed by keyword, or {_AGAIN}"
    return SplitError(f"{name} {recorded} in the example, but {given} now; {advice}", unit=unit)


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and not isinstance(value, torch.Tensor) and value == default
    )


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
