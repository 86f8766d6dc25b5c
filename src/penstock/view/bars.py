"""Computes the bars of a timeline, one for every action that a rank runs itself, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import OVERLAP_F_B
from penstock.view.palette import IDLE, STYLES, style_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.ir.actions import Action
    from penstock.simulation.timeline import Timeline

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: The names of the styles; styles are numbered by their index here.
NAMES: Final = tuple(STYLES)

#: The bar of a slice of time in whose middle nothing runs.
NO_BAR: Final = -1

_STYLE_OF_TYPE: Final = np.array([NAMES.index(IDLE), *(NAMES.index(style_name(kind)) for kind in packed.TYPE_NUMBER)])


@dataclass(frozen=True, eq=False)
class Bars:
    """What ranks run and when: rank by rank, in order of time.

    Attributes:
        ranks: the number of ranks.
        extent: when the last bar ends.
        rank: the rank of each bar.
        start: when each starts.
        end: when each ends.
        codes: the packed actions.
        first: for each bar, its first action in ``codes``; an overlap has several.
    """

    ranks: int
    extent: float
    rank: Ints
    start: Floats
    end: Floats
    codes: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def last(self) -> Ints:
        """For each bar, where its actions end in ``codes``."""
        return np.append(self.first[1:], len(self.codes))[: len(self.first)]

    @cached_property
    def style(self) -> Ints:
        """The style of each bar, by its number in ``NAMES``."""
        styles = _STYLE_OF_TYPE[packed.types(self.codes[self.first])]
        return np.where(self.last - self.first > 1, NAMES.index(style_name(OVERLAP_F_B)), styles)

    @cached_property
    def microbatch(self) -> Ints:
        """The microbatch of each bar, -1 if it has none or several."""
        return np.where(self.last - self.first > 1, -1, packed.microbatches(self.codes[self.first]))

    @cached_property
    def numbers(self) -> list[str]:
        """The microbatch of each bar as text: empty if it has none, ``4+1`` for an overlap."""
        numbers = ["" if number < 0 else str(number) for number in packed.microbatches(self.codes).tolist()]
        bounds = zip(self.first.tolist(), self.last.tolist(), strict=True)
        return ["+".join(numbers[first:last]) for first, last in bounds]

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The action of each bar."""
        return tuple(action for action in packed.unpack_cells(self.codes) if action is not None)

    def of_rank(self, rank: int) -> slice:
        """Return the slice of the bars of a rank."""
        begin, end = np.searchsorted(self.rank, [rank, rank + 1]).tolist()
        return slice(begin, end)


def bars_of(timeline: Timeline) -> Bars:
    """Return the bars of a timeline; actions that take no time have none."""
    graph = timeline.step_graph
    cells = graph.blocking[timeline.end[graph.blocking] > timeline.start[graph.blocking]]
    ends = np.append(graph.first_action[1:], len(graph.actions))
    parts = (ends - graph.first_action)[cells]
    first = np.cumsum(parts) - parts
    actions = np.repeat(graph.first_action[cells] - first, parts) + np.arange(int(parts.sum()))
    codes = graph.actions.codes[actions]
    later = np.repeat(graph.step[cells], parts) * (packed.microbatches(codes) >= 0)
    codes = packed.shift_microbatches(codes, -later.astype(np.int64) * graph.schedule.microbatches)
    start, end = timeline.start[cells], timeline.end[cells]
    return Bars(graph.ranks, timeline.makespan, graph.rank[cells], start, end, codes, first)


def shares(bars: Bars, columns: int) -> Floats:
    """Return how long each style runs in each slice of time, by rank, column and style. The rest is idle."""
    edges = np.linspace(0.0, bars.extent, columns + 1)
    taken = np.zeros((bars.ranks, columns, len(NAMES)))
    for rank in range(bars.ranks):
        mine = bars.of_rank(rank)
        start, end, style = bars.start[mine], bars.end[mine], bars.style[mine]
        for number in np.unique(style).tolist():
            chosen = style == number
            times = np.stack([start[chosen], end[chosen]], axis=1).ravel()
            ran = np.cumsum(end[chosen] - start[chosen])
            total = np.stack([np.append(0.0, ran[:-1]), ran], axis=1).ravel()
            taken[rank, :, number] = np.diff(np.interp(edges, times, total))
    taken[:, :, NAMES.index(IDLE)] = (bars.extent or 1.0) / columns - taken.sum(axis=2)
    return taken


def columns_of(bars: Bars, columns: int) -> tuple[Ints, Ints]:
    """Return what each slice of time shows, by rank and column: the style that runs most of it, and the bar.

    The bar is the one in the middle, or ``NO_BAR``; it also decides between styles that run equally long.
    """
    taken, owners = shares(bars, columns), _owners(bars, columns)
    style = np.where(owners == NO_BAR, NAMES.index(IDLE), bars.style[owners] if len(bars) else 0)
    ranks, places = np.indices(owners.shape)
    taken[ranks, places, style] += 1e-9 * (bars.extent or 1.0) / columns
    return np.asarray(taken.argmax(axis=2)), owners


def _owners(bars: Bars, columns: int) -> Ints:
    """Return the bar in the middle of each slice of time, by rank and column."""
    middles = (np.arange(columns) + 0.5) * (bars.extent / columns)
    owners = np.full((bars.ranks, columns), NO_BAR)
    for rank in range(bars.ranks):
        mine = bars.of_rank(rank)
        if mine.start < mine.stop:
            found = np.searchsorted(bars.start[mine], middles, side="right") - 1 + mine.start
            inside = (found >= mine.start) & (bars.end[np.maximum(found, 0)] > middles)
            owners[rank] = np.where(inside, found, NO_BAR)
    return owners
