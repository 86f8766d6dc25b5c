"""Draws small pictures for notebooks: self-contained inline SVG, with numbers below.

Up to a few hundred bars are drawn one by one. With more, a coarse picture shows what runs most of the time.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.ir import grid, packed
from penstock.view.bars import NAMES, Bars, bars_of, columns_of
from penstock.view.palette import IDLE, STYLES, style_name
from penstock.view.ticks import ticks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.ir.schedule import Schedule
    from penstock.simulation.timeline import Timeline

    Ints = NDArray[np.signedinteger[Any]]

_MOST_BARS: Final = 600
_MOST_RANKS: Final = 32
_MOST_ALIGNED: Final = 20_000  # actions; with more, aligning would take too long

_LEFT, _ACROSS, _RIGHT = 60, 800, 110
_ROW: Final = 22
_FONT: Final = "font:11px system-ui,sans-serif"
_DIGIT: Final = 7


def schedule_html(schedule: Schedule) -> str:
    """Draw a schedule with a column per step, like ``schedule.grid()``."""
    bars = _steps(schedule)
    return _page(_svg(bars, [], "step"), bars, [schedule.summary])


def timeline_html(timeline: Timeline) -> str:
    """Draw a timeline to scale, with the numbers of each rank."""
    bars = bars_of(timeline)
    makespan = timeline.makespan or 1.0
    numbers = zip(timeline.busy, timeline.peak_memory, strict=True)
    remarks = [f"{100 * busy / makespan:.0f} % busy, peak {peak:.4g}" for busy, peak in numbers]
    facts = f"makespan {timeline.makespan:.6g}, bubble {100 * timeline.bubble_rate:.1f} %"
    peak = f"peak memory {max(timeline.peak_memory):.6g}"
    return _page(_svg(bars, remarks, "time"), bars, [timeline.schedule.summary, f"{facts}, {peak}"])


def _steps(schedule: Schedule) -> Bars:
    """Return every action as a bar of one step, in the column where ``schedule.grid()`` draws it."""
    columns = grid.cell_columns(schedule) if len(schedule.codes) <= _MOST_ALIGNED else None
    joined = packed.is_joined(schedule.codes)
    starts = np.flatnonzero(~joined)
    rank = np.searchsorted(schedule.offsets, starts, side="right") - 1
    if columns is None:
        column = np.arange(len(starts)) - np.searchsorted(starts, schedule.offsets)[rank]
    else:
        column = np.array([-1 if place is None else place for row in columns for place in row], np.int64)
    runs = schedule.codes != packed.IDLE
    first = np.cumsum(np.append(0, runs))[starts[runs[starts]]]
    rank, start = rank[runs[starts]], column[runs[starts]].astype(np.float64)
    return Bars(schedule.ranks, float(start.max(initial=-1) + 1), rank, start, start + 1, schedule.codes[runs], first)


def _page(svg: str, bars: Bars, facts: Sequence[str]) -> str:
    styles = {style_name(kind) for kind, number in packed.TYPE_NUMBER.items() if number in packed.types(bars.codes)}
    swatch = "display:inline-block;width:10px;height:10px;margin:0 4px 0 12px;background:"
    legend = "".join(
        f'<span style="{swatch}{style.colour}"></span>{escape(style.meaning)}'
        for name, style in STYLES.items()
        if name in {*styles, IDLE}
    )
    lines = "".join(f"<div>{escape(fact)}</div>" for fact in facts)
    return f'<div style="{_FONT}">{svg}<div>{legend}</div>{lines}</div>'


def _svg(bars: Bars, remarks: Sequence[str], axis: str) -> str:
    shown = min(bars.ranks, _MOST_RANKS)
    width, height = _LEFT + _ACROSS + (_RIGHT if remarks else 10), (shown + 1) * _ROW + (shown < bars.ranks) * _ROW
    scale = _ACROSS / bars.extent if bars.extent else 0.0
    shapes = _single(bars, scale) if len(bars) <= _MOST_BARS else _coarse(bars, shown)
    inside = [*_rows(shown, bars.ranks, remarks), *shapes, *_axis(bars.extent, shown * _ROW + 14, axis)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'style="max-width:100%;{_FONT}" fill="currentColor">{"".join(inside)}</svg>'
    )


def _rows(shown: int, ranks: int, remarks: Sequence[str]) -> Iterator[str]:
    """Yield the names and numbers of the ranks, and a background of idle time."""
    for rank in range(shown):
        yield f'<text x="0" y="{rank * _ROW + 14}">rank {rank}</text>'
        yield _rectangle(_LEFT, _ACROSS, rank * _ROW + 1, _ROW - 2, IDLE)
        if remarks:
            yield f'<text x="{_LEFT + _ACROSS + 8}" y="{rank * _ROW + 14}">{escape(remarks[rank])}</text>'
    if shown < ranks:
        yield f'<text x="0" y="{(shown + 1) * _ROW + 14}">and {ranks - shown} more ranks</text>'


def _single(bars: Bars, scale: float) -> Iterator[str]:
    """Yield every bar, with the actions of an overlap on top of each other."""
    actions = iter(bars.actions)
    for rank, start, end in zip(bars.rank.tolist(), bars.start.tolist(), bars.end.tolist(), strict=True):
        action = next(actions)
        height = (_ROW - 2) / len(action.parts)
        left, across = _LEFT + start * scale, (end - start) * scale
        yield f"<g><title>{escape(str(action))}, {start:.6g} to {end:.6g}</title>"
        for place, part in enumerate(action.parts):
            name, top = style_name(part.computation_type), rank * _ROW + 1 + place * height
            yield _rectangle(left, max(across - 0.5, 0.25), top, height, name)
            number = "" if part.microbatch_index is None else str(part.microbatch_index)
            if number and len(number) * _DIGIT <= across:
                size = 11 if height > 12 else 9
                yield (
                    f'<text x="{left + across / 2:.6g}" y="{top + height / 2 + 0.36 * size:.6g}" font-size="{size}" '
                    f'text-anchor="middle" fill="{STYLES[name].ink}">{number}</text>'
                )
        yield "</g>"


def _coarse(bars: Bars, shown: int) -> Iterator[str]:
    """Yield what runs most of each slice of time; adjacent slices with the same style are drawn as one."""
    columns = min(_ACROSS // 2, 4 * _MOST_BARS // shown)
    styles, _ = columns_of(bars, columns)
    step = _ACROSS / columns
    for rank in range(shown):
        changed = np.flatnonzero(np.diff(styles[rank])) + 1
        for begin, end in pairwise([0, *changed.tolist(), columns]):
            if (name := NAMES[styles[rank, begin]]) != IDLE:
                yield _rectangle(_LEFT + begin * step, (end - begin) * step, rank * _ROW + 1, _ROW - 2, name)


def _axis(extent: float, bottom: int, word: str) -> Iterator[str]:
    """Yield round times at their positions; for steps, only whole numbers."""
    yield f'<text x="0" y="{bottom}">{word}</text>'
    if not extent:
        return
    for time, text in ticks(extent, lambda widest: _ACROSS / (_DIGIT * (widest + 2))):
        if time < extent and (word == "time" or time.is_integer()):
            yield f'<text x="{_LEFT + time / extent * _ACROSS:.6g}" y="{bottom}">{text}</text>'


def _rectangle(left: float, across: float, top: float, height: float, name: str) -> str:
    place = f'x="{left:.6g}" y="{top:.6g}" width="{across:.6g}" height="{height:.6g}"'
    return f'<rect {place} fill="{STYLES[name].colour}"/>'
