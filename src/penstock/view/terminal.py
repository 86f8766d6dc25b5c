"""Draws a timeline to scale as text: a line per rank, a column per slice of time. The caller chooses the colours.

::

           busy peak
    rank 0  75%    2 F0F1....B0--F2B1--..B2--
    rank 1  75%    1 ..F0B0--F1B1--F2B2--....
    time             0   2   4   6   8   10
    # F forward   B backward   . idle
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.ir import packed
from penstock.view.bars import NAMES, NO_BAR, bars_of, columns_of
from penstock.view.palette import IDLE, STYLES
from penstock.view.ticks import ticks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.simulation.timeline import Timeline
    from penstock.view.bars import Bars

    Ints = NDArray[np.signedinteger[Any]]

#: The style of what is not a bar: ranks, numbers, the axis.
PLAIN: Final = ""
DIM: Final = "dim"

_IDLE: Final = NAMES.index(IDLE)
_LEAST_COLUMNS: Final = 16


class Segment(NamedTuple):
    """Some text and its style.

    Attributes:
        text: the text.
        style: a name in ``palette.STYLES``, ``"dim"``, or empty.
    """

    text: str
    style: str = PLAIN


Line: TypeAlias = list[Segment]


def draw(timeline: Timeline, width: int, *, colour: bool) -> list[Line]:
    """Draw the timeline in lines of at most ``width`` columns.

    Each column shows what runs for most of its slice of time. A bar begins with the letter of its type, then its
    microbatch if there is room. If all times are multiples of a unit, the unit takes a whole number of columns.

    Args:
        timeline: the timeline.
        width: the number of columns.
        colour: whether bars will be coloured; if not, a line follows the label of each bar.
    """
    bars = bars_of(timeline)
    heads = _heads(timeline, width)
    room = max(width - len(heads[0]) - 1, 1)
    columns = _fitting(bars, room)
    styles, owners = columns_of(bars, columns)
    labels = _labels(timeline, bars, columns)
    fill = " " if colour else "-"
    lines = [[Segment(heads[0].rstrip(), DIM)]] if heads[0].strip() else []
    for rank, head in enumerate(heads[1:]):
        lines.append([Segment(f"{head} "), *_row(styles[rank], owners[rank], bars, labels, fill)])
    axis = _axis(bars.extent, columns, room)
    lines.append([Segment(f"{'time':<{len(heads[0])}} {axis}", DIM)])
    return [*lines, *_legend(styles, width)]


def plain(timeline: Timeline, width: int) -> str:
    """Draw the timeline as text without colour, in lines of at most ``width`` columns."""
    return "\n".join("".join(segment.text for segment in line) for line in draw(timeline, width, colour=False))


def _heads(timeline: Timeline, width: int) -> list[str]:
    """Return the start of each line: the titles of the numbers, then the name and numbers of every rank."""
    names = [f"rank {rank}" for rank in range(timeline.step_graph.ranks)]
    label = len(names[-1])
    makespan = timeline.makespan or 1.0
    busy = [f"{100 * time / makespan:.0f}%" for time in timeline.busy]
    peaks = [f"{peak:.4g}" for peak in timeline.peak_memory]
    high = max(map(len, [*peaks, "peak"]))
    numbered = [
        f"{name:<{label}} {share:>4} {peak:>{high}}" for name, share, peak in zip(names, busy, peaks, strict=True)
    ]
    if width - len(numbered[0]) - 1 < _LEAST_COLUMNS:
        return [" " * label, *(f"{name:<{label}}" for name in names)]
    return [f"{'':<{label}} busy {'peak':>{high}}", *numbered]


def _fitting(bars: Bars, room: int) -> int:
    """Choose the number of columns: a whole number per unit of time, unless that leaves more than a third empty."""
    lengths = bars.end - bars.start
    if not len(lengths):
        return room
    for parts in (1, 2, 3, 4, 5, 10):
        unit = float(lengths.min()) / parts
        times = np.concatenate([bars.start, bars.end]) / unit
        if np.allclose(times, np.round(times), rtol=0.0, atol=1e-6):
            units = round(bars.extent / unit)
            whole = room // units * units
            return whole if 3 * whole >= 2 * room else room
    return room


def _labels(timeline: Timeline, bars: Bars, columns: int) -> list[str]:
    """Return the label of each bar: letter and microbatch, preceded by the stage if ranks have several and it fits."""
    letters = [STYLES[NAMES[style]].letter for style in bars.style.tolist()]
    labels = [letter + numbers for letter, numbers in zip(letters, bars.numbers, strict=True)]
    if timeline.schedule.stages == timeline.step_graph.ranks or not labels:
        return labels
    stages, single = packed.stages(bars.codes[bars.first]).tolist(), (bars.microbatch >= 0).tolist()
    whole = [f"{stage}{label}" if alone else label for stage, label, alone in zip(stages, labels, single, strict=True)]
    narrowest = float((bars.end - bars.start).min()) * columns / bars.extent
    return whole if max(map(len, whole)) < narrowest else labels


def _row(styles: Ints, owners: Ints, bars: Bars, labels: list[str], fill: str) -> Iterator[Segment]:
    """Yield a line of bars, cut where the style or the bar changes."""
    changed = np.flatnonzero((np.diff(styles) != 0) | ((np.diff(owners) != 0) & (styles[1:] != _IDLE))) + 1
    for begin, end in pairwise([0, *changed.tolist(), len(styles)]):
        style, owner = int(styles[begin]), int(owners[begin])
        letter = STYLES[NAMES[style]].letter
        label = labels[owner] if owner != NO_BAR and bars.style[owner] == style else letter
        label = label if len(label) <= end - begin else letter
        yield Segment(label.ljust(end - begin, letter if style == _IDLE else fill), NAMES[style])


def _axis(extent: float, columns: int, room: int) -> str:
    """Return the times, each below the column where it begins."""
    if not extent:
        return "0"
    text = ""
    for time, tick in ticks(extent, lambda widest: columns / (widest + 2)):
        column = round(time / extent * columns)
        if column + len(tick) <= room:
            text = text.ljust(column) + tick
    return text


def _legend(styles: Ints, width: int) -> list[Line]:
    """Return the meaning of the letters in the picture, in as many lines as needed."""
    lines, used = [[Segment("#", DIM)]], 1
    for name in (name for number, name in enumerate(NAMES) if number in styles):
        style = STYLES[name]
        gap, meaning = " " if len(lines[-1]) == 1 else "   ", f" {style.meaning}"
        if used + len(gap + style.letter + meaning) > width and len(lines[-1]) > 1:
            lines.append([Segment("#", DIM)])
            gap, used = " ", 1
        lines[-1] += [Segment(gap), Segment(style.letter, name), Segment(meaning)]
        used += len(gap + style.letter + meaning)
    return lines
