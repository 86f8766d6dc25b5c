"""Expands and writes Megatron's notation of layouts, e.g. ``Et*3|(tt|)*29,m|L``: the symbols of each stage.

========  ============================================================================
``E``     the embedding: everything that comes before the layers
``t``     a transformer layer
``m``     a layer for multi-token prediction
``L``     the loss: everything that comes after the layers, e.g. the last norm and head
``|``     the boundary between two stages
``x*n``   ``x``, ``n`` times, where ``x`` is one symbol or a group in parentheses
========  ============================================================================

Commas and white space are ignored. Groups may be nested here, which Megatron does not read; ``render`` never nests
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import SplitError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What each symbol stands for.
SYMBOLS: Final = {"E": "embedding", "t": "layer", "m": "multi-token-prediction layer", "L": "loss"}
_IGNORED: Final = ", \t\r\n"
_LONGEST: Final = 1_000_000


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
        elif symbol not in SYMBOLS and symbol != "|":
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
