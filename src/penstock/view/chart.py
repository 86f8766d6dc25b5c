"""Draws a timeline as a figure for a paper, as PNG or SVG with matplotlib.

Ranks are rows, and bars have the colour of their type and the number of their microbatch. If ranks hold several stages,
a dark foot distinguishes them: none for the first, and higher for each later one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.errors import WriteError
from penstock.ir import packed
from penstock.ir.formats.files import atomic_file
from penstock.simulation.timeline import WRITERS
from penstock.view.bars import NAMES, bars_of
from penstock.view.palette import IDLE, STYLES, style_name

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from penstock.simulation.timeline import Timeline
    from penstock.view.bars import Bars

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: With more bars, single ones could not be seen.
MOST_BARS: Final = 50_000

_MOST_LABELS: Final = 3_000
_FONT_SIZES: Final = (7.0, 5.5)
_POINTS: Final = 72.0
_DIGIT: Final = 0.62  # the width of a digit, relative to the font size
_SIDES: Final = 1.0  # inches left and right of the bars
_LEGEND_ENTRY: Final = 1.2  # inches
_HIGHEST_FOOT: Final = 0.18  # relative to the height of a bar
_SETTINGS: Final[dict[Any, Any]] = {"svg.fonttype": "none", "svg.hashsalt": "penstock", "font.size": 8.0}


def write_chart(timeline: Timeline, path: Path) -> None:
    """Write a chart as PNG or SVG, depending on the suffix, completely or not at all.

    Raises:
        WriteError: matplotlib is not installed, there are too many actions, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise WriteError("charts need matplotlib, which is not installed: pip install 'penstock[chart]'")
    bars = bars_of(timeline)
    if len(bars) > MOST_BARS:
        raise WriteError(
            f"a chart of {len(bars)} actions would be too dense to read (at most {MOST_BARS}); "
            f"write *.html or *.json, which can be zoomed"
        )
    from matplotlib import rc_context

    image = BytesIO()
    kind = path.suffix.lower().lstrip(".")
    with rc_context(_SETTINGS):
        # Without the date, the same timeline gives the same file.
        figure(timeline, bars).savefig(image, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else {})
    with atomic_file(path) as file:
        file.write(image.getvalue())


def figure(timeline: Timeline, bars: Bars) -> Figure:
    """Draw the chart as a figure."""
    from matplotlib.figure import Figure

    parts = _parts(timeline, bars)
    layout = _Layout(bars.ranks, bars.extent or 1.0, parts)
    drawn = Figure(figsize=(layout.width + _SIDES, layout.height + 1.0), layout="constrained")
    axes = drawn.add_subplot()
    _draw_bars(axes, layout)
    _draw_labels(axes, layout)
    _draw_frame(axes, layout)
    _draw_words(drawn, axes, timeline, parts)
    return drawn


class _Parts(NamedTuple):
    """What is drawn in one colour: bars, and the actions of overlaps, which share the height of a bar."""

    rank: Ints
    start: Floats
    length: Floats
    top: Floats
    height: Floats
    style: Ints
    microbatch: Ints
    foot: Floats


def _parts(timeline: Timeline, bars: Bars) -> _Parts:
    count = bars.last - bars.first
    block = np.repeat(np.arange(len(bars)), count)
    place = np.arange(len(bars.codes)) - bars.first[block]
    height = 1.0 / count[block]
    styles = np.array([0, *(NAMES.index(style_name(kind)) for kind in packed.TYPE_NUMBER)])
    stages_of = timeline.schedule.placement.stages_of
    among = {stage: place for stages in map(stages_of, range(bars.ranks)) for place, stage in enumerate(stages)}
    local = np.array([among[stage] for stage in sorted(among)])
    foot = local / max(int(local.max()), 1) * _HIGHEST_FOOT
    return _Parts(
        bars.rank[block],
        bars.start[block],
        (bars.end - bars.start)[block],
        place * height,
        height,
        styles[packed.types(bars.codes)],
        packed.microbatches(bars.codes),
        foot[packed.stages(bars.codes)],
    )


@dataclass(frozen=True)
class _Layout:
    """How large everything is, in inches and points."""

    ranks: int
    extent: float
    parts: _Parts

    @cached_property
    def width(self) -> float:
        """The width of all bars, so that a number fits into a short one, as far as a page allows."""
        if not len(self.parts.length):
            return 6.0
        short = float(np.percentile(self.parts.length, 20))
        digits = len(str(int(self.parts.microbatch.max(initial=0))))
        return float(np.clip(self.extent / short * (0.06 + 0.075 * digits), 6.0, 17.0))

    @cached_property
    def height(self) -> float:
        """The height of all ranks."""
        tall = 0.34 if (self.parts.height < 1).any() else 0.27
        return min(self.ranks * tall, max(12.0, self.ranks * 0.05))

    @property
    def row(self) -> float:
        """The height of a rank in points."""
        return self.height / self.ranks * _POINTS

    @property
    def lengths(self) -> Floats:
        """The length of every part, in points."""
        return self.parts.length / self.extent * self.width * _POINTS

    @property
    def above_feet(self) -> float:
        """The share of the height of a part above the highest foot, where the numbers are."""
        return 1.0 - float(self.parts.foot.max(initial=0.0))

    @property
    def block(self) -> float:
        """The height of a bar, in rows."""
        return 0.86 if self.row > 4 else 1.0


def _draw_bars(axes: Axes, layout: _Layout) -> None:
    parts, block = layout.parts, layout.block
    ranks = np.arange(layout.ranks, dtype=np.float64)
    idle = _rectangles(0 * ranks, 0 * ranks + layout.extent, ranks - block / 2, 0 * ranks + block)
    _add(axes, idle, facecolors=STYLES[IDLE].colour)
    top, height = parts.rank - block / 2 + parts.top * block, parts.height * block
    bars = _rectangles(parts.start, parts.length, top, height)
    _add(axes, bars, facecolors=np.array([STYLES[name].colour for name in NAMES])[parts.style])
    foot = parts.foot * height
    feet = _rectangles(parts.start, parts.length, top + height - foot, foot)[parts.foot > 0]
    _add(axes, feet, facecolors="#000000", alpha=0.5)
    if len(layout.lengths) and float(np.median(layout.lengths)) > 3:
        _add(axes, bars, facecolors="none", edgecolors="white", linewidths=0.5)


def _add(axes: Axes, shapes: Floats, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    vertices: Any = shapes  # an array is faster than the list that the type asks for
    axes.add_collection(PolyCollection(vertices, **{"linewidths": 0, **style}), autolim=False)


def _rectangles(start: Floats, length: Floats, top: Floats, height: Floats) -> Floats:
    across = np.stack([start, start, start + length, start + length], axis=1)
    down = np.stack([top, top + height, top + height, top], axis=1)
    return np.stack([across, down], axis=2)


def _draw_labels(axes: Axes, layout: _Layout) -> None:
    """Draw the numbers of microbatches where they fit."""
    parts = layout.parts
    for size in _FONT_SIZES:
        fits = _fitting(layout, size)
        if len(fits) * 2 > np.count_nonzero(parts.microbatch >= 0):
            break
    if len(fits) > _MOST_LABELS:
        return
    middle = parts.rank + (parts.top + parts.height * layout.above_feet / 2 - 0.5) * layout.block
    for place in fits.tolist():
        axes.text(
            float(parts.start[place] + parts.length[place] / 2),
            float(middle[place]),
            str(parts.microbatch[place]),
            color=STYLES[NAMES[parts.style[place]]].ink,
            fontsize=size,
            ha="center",
            va="center_baseline",
        )


def _fitting(layout: _Layout, size: float) -> Ints:
    """Return the parts whose number fits at this font size."""
    parts = layout.parts
    digits = np.floor(np.log10(np.maximum(parts.microbatch, 1))) + 1
    wide = layout.lengths >= digits * size * _DIGIT + 1
    high = parts.height * layout.above_feet * layout.block * layout.row >= size
    return np.flatnonzero(wide & high & (parts.microbatch >= 0))


def _draw_frame(axes: Axes, layout: _Layout) -> None:
    axes.set_xlim(0, layout.extent)
    axes.set_ylim(layout.ranks - 0.5, -0.5)
    every = max(1, round(9 / layout.row))
    ranks = range(0, layout.ranks, every)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=3, color="#666666")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#666666")
    axes.set_xlabel("time")


def _draw_words(drawn: Figure, axes: Axes, timeline: Timeline, parts: _Parts) -> None:
    """Draw the title above and the legend below."""
    from matplotlib.patches import Patch

    present = {NAMES[number] for number in np.unique(parts.style).tolist()} | {IDLE}
    patches = [Patch(color=style.colour, label=style.meaning) for name, style in STYLES.items() if name in present]
    if (parts.foot > 0).any():
        patches.append(Patch(color="#444444", label="foot: later stage of the rank"))
    lines = math.ceil(len(patches) * _LEGEND_ENTRY / drawn.get_figwidth())
    columns = math.ceil(len(patches) / lines)
    drawn.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, handlelength=1.2)
    name = str(timeline.schedule.metadata.get("name", ""))
    facts = f"makespan {timeline.makespan:.6g}, bubble {100 * timeline.bubble_rate:.1f} %"
    title = f"{name}: {facts}" if name and name.isprintable() else facts
    axes.set_title(title, loc="left", fontsize=8, color="#333333", parse_math=False)


WRITERS[".png"] = write_chart
WRITERS[".svg"] = write_chart
