"""Reads and writes layouts in Megatron's notation, e.g. ``Et*3|(tt|)*29,m|L``.

``penstock.planning.frameworks.megatron_notation`` lists its symbols. As in Megatron, ``E`` comes first, ``L`` last, and
``t`` before ``m``. Megatron allows empty stages (``E||t|L``) and so does ``parse``; a model cannot be laid out like
that, since a stage needs a unit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import SplitError
from penstock.models.layout import Layout, check_layout, shorten
from penstock.models.partition import repeated_units
from penstock.planning.frameworks.megatron_notation import SYMBOLS, parse, render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Groups(NamedTuple):
    """The units of a model, as Megatron's notation knows them; each in call order.

    Attributes:
        before: what ``E`` stands for.
        layers: a unit for each ``t``.
        predictors: a unit for each ``m``.
        after: what ``L`` stands for.
    """

    before: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    predictors: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def group_units(units: Sequence[str], *, predictors: Sequence[str] = ()) -> Groups:
    """Sort units into what Megatron's notation knows: the longest list of a model holds its layers.

    Args:
        units: the names of all units, in call order.
        predictors: those that predict further tokens; by default the units in a module whose name begins with "mtp".

    >>> group_units(["embed", "layers.0", "layers.1", "mtp.0", "norm", "head"])
    Groups(before=('embed',), layers=('layers.0', 'layers.1'), predictors=('mtp.0',), after=('norm', 'head'))
    """
    chosen = list(predictors) or [unit for unit in units if any(part.startswith("mtp") for part in unit.split("."))]
    others = [unit for unit in units if unit not in set(chosen)]
    lists: dict[str, list[str]] = defaultdict(list)
    for unit in repeated_units(others):
        lists[unit.rpartition(".")[0]].append(unit)
    layers = max(lists.values(), key=len, default=[])
    if not layers:
        raise SplitError("the model has no units")
    first, last = others.index(layers[0]), others.index(layers[-1])
    if between := [unit for unit in others[first:last] if unit not in layers]:
        raise SplitError(
            f"{shorten(between)} between the layers has no symbol in Megatron's notation; list the names of each stage "
            "instead",
            unit=between[0],
        )
    return Groups(tuple(others[:first]), tuple(layers), tuple(chosen), tuple(others[last + 1 :]))


def read(text: str, groups: Groups) -> Layout:
    """Read a layout for the given units.

    >>> groups = group_units(["embed", "layers.0", "layers.1", "layers.2", "norm", "head"])
    >>> read("Et|t*2|L", groups)
    (('embed', 'layers.0'), ('layers.1', 'layers.2'), ('norm', 'head'))
    """
    stages = parse(text)
    _check_order(text, "".join(stages), groups)
    left = {symbol: iter(units) for symbol, units in zip("tm", (groups.layers, groups.predictors), strict=True)}
    layout = []
    for number, symbols in enumerate(stages):
        names = [unit for symbol in symbols for unit in _units_of(symbol, groups, left)]
        if not names:
            raise SplitError(
                f"stage {number} of {text!r} is empty; Megatron allows that, but here every stage needs a unit"
                + (f": the model has nothing for {symbols}" if symbols else "")
            )
        layout.append(tuple(names))
    return tuple(layout)


def write(layout: Layout, groups: Groups) -> str:
    """Write a layout in Megatron's notation, in few characters.

    >>> groups = Groups(("embed",), tuple(f"layers.{n}" for n in range(7)), (), ("norm", "head"))
    >>> write(read("Et|(tt|)*3,L", groups), groups)
    'Et|(tt|)*3,L'
    """
    check_layout(layout, [*groups.before, *groups.layers, *groups.predictors, *groups.after])
    symbol_of = dict.fromkeys(groups.layers, "t") | dict.fromkeys(groups.predictors, "m")
    symbol_of |= dict.fromkeys(groups.before[:1], "E") | dict.fromkeys(groups.before[1:], "")
    symbol_of |= dict.fromkeys(groups.after[:1], "L") | dict.fromkeys(groups.after[1:], "")
    text = render(["".join(symbol_of[unit] for unit in stage) for stage in layout])
    try:
        same = [sorted(stage) for stage in read(text, groups)] == [sorted(stage) for stage in layout]
    except SplitError:
        same = False
    if not same:
        raise SplitError(
            "the layout does not fit Megatron's notation, in which layers follow each other from stage to stage, after "
            f"{shorten(groups.before) or 'nothing'} and before {shorten(groups.after) or 'nothing'}; write the names "
            "of each stage instead"
        )
    return text


def _units_of(symbol: str, groups: Groups, left: dict[str, Iterator[str]]) -> tuple[str, ...]:
    if symbol == "E":
        return groups.before
    if symbol == "L":
        return groups.after
    return (next(left[symbol]),)


def _check_order(text: str, symbols: str, groups: Groups) -> None:
    for symbol, units in (("t", groups.layers), ("m", groups.predictors)):
        found = symbols.count(symbol)
        if found != len(units):
            raise SplitError(
                f"{text!r} has {found} {symbol} ({SYMBOLS[symbol]}), but the model has {len(units)}"
                + (f": {shorten(units)}" if units else "")
            )
    expected = sorted(symbols, key="EtmL".index)
    for symbol, units in (("E", groups.before), ("L", groups.after)):
        if symbols.count(symbol) > 1 or (units and symbol not in symbols):
            raise SplitError(f"{text!r} needs {symbol} ({SYMBOLS[symbol]}) exactly once, for {shorten(units)}")
    if list(symbols) != expected:
        raise SplitError(f"{text!r} is out of order: E comes first, then t, then m, and L last")
