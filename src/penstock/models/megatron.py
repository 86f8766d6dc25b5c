"""Reads and writes layouts in Megatron's notation, e.g. ``Et*3|(tt|)*29,m|L``.

========  ============================================================================
``E``     the embedding: everything that comes before the layers
``t``     a transformer layer
``m``     a layer for multi-token prediction
``L``     the loss: everything that comes after the layers, e.g. the last norm and head
``|``     the boundary between two stages
``x*n``   ``x``, ``n`` times, where ``x`` is one symbol or a group in parentheses
========  ============================================================================

Commas and white space are ignored. As in Megatron, ``E`` comes first, ``L`` last, and ``t`` before ``m``. Megatron
allows empty stages (``E||t|L``) and so does ``parse``; a model cannot be laid out that way, since a stage needs a unit.
Groups may be nested here, which Megatron does not read; ``write`` never nests them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import SplitError
from penstock.models.layout import Layout, check_layout, shorten
from penstock.models.partition import repeated_units

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NAMES: Final = {"E": "embedding", "t": "layer", "m": "multi-token-prediction layer", "L": "loss"}
_IGNORED: Final = ", \t\r\n"
_LONGEST: Final = 1_000_000


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


def parse(text: str) -> tuple[str, ...]:
    """Expand the notation to the symbols of each stage.

    >>> parse("Et*3|(tt|)*2,m|L")
    ('Ettt', 'tt', 'tt', 'm', 'L')
    """
    expanded, end = _expand(text, 0, depth=0)
    if end < len(text):
        raise _error(text, end, "this parenthesis was never opened")
    return tuple(expanded.split("|"))


def render(stages: Sequence[str]) -> str:
    """Write the symbols of each stage in the fewest characters; ``parse`` reads it back.

    >>> render(["Ettt", "tt", "tt", "tt", "tt", "m", "L"])
    'Et*3|(tt|)*4,m|L'
    """
    *closed, last = (_shorten_runs(symbols) for symbols in stages)
    count = len(closed)
    best: list[tuple[int, str]] = [(0, "")] * (count + 1)  # by first stage: what the rest is written as
    for start in reversed(range(count)):
        written = f"{closed[start]}|"
        candidates = [(written, start + 1)]
        for period in range(1, (count - start) // 2 + 1):
            times = _repetitions(closed, start, period)
            body = "".join(f"{stage}|" for stage in closed[start : start + period])
            candidates += [(f"({body})*{times},", start + period * times)] if times > 1 else []
        best[start] = min((len(written) + best[end][0], written + best[end][1]) for written, end in candidates)
    # A comma separates a number from a symbol, for people.
    return (best[0][1] + last).replace(",|", "|").replace(",(", "(").rstrip(",")


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
                f"{text!r} has {found} {symbol} ({_NAMES[symbol]}), but the model has {len(units)}"
                + (f": {shorten(units)}" if units else "")
            )
    expected = sorted(symbols, key="EtmL".index)
    for symbol, units in (("E", groups.before), ("L", groups.after)):
        if symbols.count(symbol) > 1 or (units and symbol not in symbols):
            raise SplitError(f"{text!r} needs {symbol} ({_NAMES[symbol]}) exactly once, for {shorten(units)}")
    if list(symbols) != expected:
        raise SplitError(f"{text!r} is out of order: E comes first, then t, then m, and L last")


def _expand(text: str, position: int, *, depth: int) -> tuple[str, int]:
    """Expand up to the end of the text or of the group; return the symbols and where they end."""
    parts: list[str] = []
    while position < len(text) and text[position] != ")":
        start, symbol = position, text[position]
        position += 1
        if symbol in _IGNORED:
            continue
        if symbol == "(":
            symbol, position = _group(text, position, depth)
        elif symbol not in _NAMES and symbol != "|":
            raise _error(text, start, f"{symbol!r} is not a symbol; use E, t, m, L, |, *, parentheses and commas")
        times, position = _times(text, position, needed=text[start] == "(")
        if times * len(symbol) > _LONGEST:
            raise _error(text, start, f"this stands for more than {_LONGEST} symbols")
        parts.append(symbol * times)
    return "".join(parts), position


def _group(text: str, position: int, depth: int) -> tuple[str, int]:
    if depth > 20:
        raise _error(text, position - 1, "groups are nested too deeply")
    content, end = _expand(text, position, depth=depth + 1)
    if end == len(text):
        raise _error(text, position - 1, "this parenthesis is not closed")
    if not content:
        raise _error(text, position - 1, "this group is empty")
    return content, end + 1


def _times(text: str, position: int, *, needed: bool) -> tuple[int, int]:
    """Read ``*n``, or nothing; return the factor and where it ends."""
    if text[position : position + 1] != "*":
        if needed:
            raise _error(text, position, "a group needs *n behind it, e.g. (tt|)*4")
        return 1, position
    end = position + 1
    while text[end : end + 1] in set("0123456789"):
        end += 1
    digits = text[position + 1 : end]
    if not digits or len(digits) > 7 or int(digits) == 0:
        raise _error(text, position + 1, "* needs a number from 1 behind it, e.g. t*3")
    return int(digits), end


def _error(text: str, position: int, message: str) -> SplitError:
    return SplitError(f"{message}, at position {position}:\n  {text}\n  {' ' * position}^")


def _shorten_runs(symbols: str) -> str:
    written, start = "", 0
    while start < len(symbols):
        end = start
        while end < len(symbols) and symbols[end] == symbols[start]:
            end += 1
        length = end - start
        written += f"{symbols[start]}*{length}," if length > 2 else symbols[start:end]
        start = end
    return written.rstrip(",")


def _repetitions(stages: Sequence[str], start: int, period: int) -> int:
    """Return how often the next stages repeat."""
    times = 1
    while stages[start : start + period] == stages[start + times * period : start + (times + 1) * period]:
        times += 1
    return times
