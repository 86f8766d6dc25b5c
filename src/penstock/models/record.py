"""Defines the record of a probe: what the units of a model take and return, as plain data.

JSON holds it both ways, so one process can probe a model and others can use the result.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

import torch
from torch.utils import _pytree as pytree

from penstock.errors import SplitError

#: What a value may come from; see ``Source``.
OUTPUT: Final = "output"
ARGUMENT: Final = "argument"
INNER: Final = "inner"
INPUT: Final = "input"
PARAMETER: Final = "parameter"
INSIDE: Final = "inside"
RANDOM: Final = "random"


class Source(NamedTuple):
    """Where a value comes from.

    Attributes:
        kind: ``"output"``, a tensor that a call returns; ``"argument"``, one that it gets, computed by glue from
            several sources; ``"inner"``, an output of a module in the unit; ``"input"``, one of the model's;
            ``"parameter"``, a parameter or buffer; ``"inside"``, something that left a call by a side channel;
            ``"random"``, numbers that glue has drawn.
        call: the number of the call, or of the draw.
        leaf: the number of the tensor among those of the call.
        name: the name of the input or parameter.
    """

    kind: str
    call: int = -1
    leaf: int = -1
    name: str = ""


class Leaf(NamedTuple):
    """One leaf of a value that a module returns.

    Attributes:
        kind: ``"tensor"``; ``"passed"``, an argument returned as it is; ``"constant"``; ``"opaque"``, anything else.
        value: the number of the argument, the constant, or the name of the type.
        dtype: the element type of a tensor.
        shape: its dimensions: ``(size,)``, ``(argument, dimension)`` if it is that of an argument, ``(argument,
            dimension, dimension)`` if it is the product of two, ``(argument, -1)`` if it is the argument itself.
        gradient: whether the tensor requires a gradient.
        size: its shape in the probe.
    """

    kind: str
    value: Any = None
    dtype: str = ""
    shape: tuple[tuple[int, ...], ...] = ()
    gradient: bool = False
    size: tuple[int, ...] = ()

    @property
    def outermost(self) -> str:
        """The name of its type."""
        return (
            type(self.value).__name__
            if self.kind == "constant"
            else {"opaque": str(self.value)}.get(self.kind, "tensor")
        )


class Value(NamedTuple):
    """The structure of what a module returns.

    Attributes:
        spec: the nesting, as text; empty for a single leaf.
        leaves: the leaves.
    """

    spec: str
    leaves: tuple[Leaf, ...]

    @property
    def structure(self) -> pytree.TreeSpec:
        """The nesting."""
        return _spec(self.spec) if self.spec else _LEAF

    @property
    def outermost(self) -> str:
        """The name of the type of the whole value."""
        if self.spec:
            return str(getattr(self.structure.type, "__name__", self.structure.type))
        return self.leaves[0].outermost

    def build(self, leaves: list[Any]) -> Any:
        """Return a value with these leaves."""
        return pytree.tree_unflatten(leaves, _spec(self.spec)) if self.spec else leaves[0]


class Argument(NamedTuple):
    """A tensor that glue has computed from several sources, as it enters a call.

    Attributes:
        leaf: its number among the tensors of the call.
        sources: what it was computed from.
        tensor: what it is.
        is_view: whether it is a view of another tensor.
    """

    leaf: int
    sources: tuple[Source, ...]
    tensor: Leaf
    is_view: bool = False


class Inner(NamedTuple):
    """An output of a module in a unit that is needed outside, although the unit does not return it.

    Attributes:
        places: where it was returned: the module's name, the number of its call within the unit's, and the leaf.
        tensor: what it is.
    """

    places: tuple[tuple[str, int, int], ...]
    tensor: Leaf


class InnerCall(NamedTuple):
    """A call of a module in a unit: the module's name, the number of the call within the unit's, what it returned."""

    module: str
    number: int
    value: Value


class Call(NamedTuple):
    """A call of a unit, or of a glue module that draws random numbers.

    Attributes:
        unit: its name.
        is_glue: whether it is a glue module.
        value: what it returned.
        feeds: everything it was given or has read.
        arguments: its arguments with several sources.
        inner: outputs of modules in it that are needed outside.
        inner_calls: the calls that returned these, in the order in which they ended.
        given: where in the arguments its tensors and whole numbers were; other fields refer to them by position.
    """

    unit: str
    is_glue: bool
    value: Value
    feeds: tuple[Source, ...]
    arguments: tuple[Argument, ...] = ()
    inner: tuple[Inner, ...] = ()
    inner_calls: tuple[InnerCall, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def all_feeds(self) -> list[Source]:
        """What it was given, and what that was computed from."""
        return [*self.feeds, *(source for argument in self.arguments for source in argument.sources)]


class Checkpoint(NamedTuple):
    """An activation checkpoint that glue puts around calls.

    Attributes:
        calls: the numbers of the calls.
        has_tail: whether glue computes something behind the last of them.
    """

    calls: tuple[int, ...]
    has_tail: bool


class Record(NamedTuple):
    """What a probe has found.

    Attributes:
        calls: the calls, in order.
        result: the sources of the model's output.
        positional: the positional inputs.
        keywords: the names of the keyword inputs.
        keyword_leaves: what each of them was: its leaves, by where they are in it.
        draws: the names of the modules whose glue has drawn random numbers, by the number of the draw.
        is_random: whether anything was drawn.
        changed: values that are changed in place after they were computed.
        checkpoints: the checkpoints around calls.
        is_eval_only: whether it was made in eval mode, since the model could not run the example in training mode.
    """

    calls: tuple[Call, ...]
    result: tuple[Source, ...]
    positional: tuple[Value, ...]
    keywords: tuple[str, ...]
    keyword_leaves: tuple[tuple[tuple[str, Leaf], ...], ...]
    draws: tuple[str, ...] = ()
    is_random: bool = False
    changed: tuple[Source, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    is_eval_only: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return dict(zip(self._fields, (_plain(field) for field in self), strict=True))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what ``to_json`` returns."""
        try:
            return cls(
                tuple(map(_read_call, data["calls"])),
                _read_sources(data["result"]),
                tuple(map(_read_value, data["positional"])),
                tuple(data["keywords"]),
                tuple(tuple((path, _read_leaf(leaf)) for path, leaf in one) for one in data["keyword_leaves"]),
                tuple(data["draws"]),
                bool(data["is_random"]),
                _read_sources(data["changed"]),
                tuple(Checkpoint(tuple(calls), has_tail) for calls, has_tail in data["checkpoints"]),
                bool(data["is_eval_only"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SplitError(
                f"the description of the split is damaged: its record of the probe cannot be read ({error!r})"
            ) from None


_LEAF: Final = pytree.tree_structure(0)


@lru_cache(maxsize=256)
def _spec(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)


def dtype_of(name: str) -> torch.dtype:
    """Return the element type of this name.

    >>> dtype_of("float64")
    torch.float64
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SplitError(f"unknown element type {name!r}")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


def _read_sources(data: Any) -> tuple[Source, ...]:
    return tuple(Source(*one) for one in data)


def _read_leaf(data: Any) -> Leaf:
    kind, value, dtype, shape, gradient, size = data
    return Leaf(kind, value, dtype, tuple(tuple(dimension) for dimension in shape), gradient, tuple(size))


def _read_value(data: Any) -> Value:
    spec, leaves = data
    return Value(spec, tuple(map(_read_leaf, leaves)))


def _read_call(data: Any) -> Call:
    unit, is_glue, value, feeds, arguments, inner, inner_calls, given = data
    return Call(
        unit,
        is_glue,
        _read_value(value),
        _read_sources(feeds),
        tuple(Argument(leaf, _read_sources(found), _read_leaf(t), is_view) for leaf, found, t, is_view in arguments),
        tuple(
            Inner(tuple((name, number, leaf) for name, number, leaf in places), _read_leaf(t)) for places, t in inner
        ),
        tuple(InnerCall(module, number, _read_value(value)) for module, number, value in inner_calls),
        tuple(given),
    )
