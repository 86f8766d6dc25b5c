"""Draws a schedule in colour, in blocks of steps that fit the width of the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from penstock.errors import ScheduleError
from penstock.ir import grid
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    ComputationType,
)
from penstock.ir.alignment import unit_steps
from penstock.view.palette import IDLE, STYLES, style_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.ir.actions import Action
    from penstock.ir.schedule import Schedule

_IDLE_STYLE: Final = STYLES[IDLE].terminal


class GridDrawing:
    """A schedule laid out for a width, or in one block without a width. Iteration draws block by block."""

    def __init__(self, schedule: Schedule, *, aligned: bool | None, width: int | None, colour: bool = True) -> None:
        self._schedule = schedule
        self._colour = colour
        #: Whether lines have to be folded to a width.
        self.is_folded = width is not None
        columns = grid.cell_columns(schedule, aligned=aligned)
        self._remark = _why_as_written(schedule) if columns is None and aligned is None else ""
        self._lines = [grid.line(schedule, rank, columns) for rank in range(schedule.ranks)]
        self._widths = [self._step_width(step) for step in range(max(map(len, self._lines), default=0))]
        self._label = len(f"rank {schedule.ranks - 1}")
        self._cuts = list(grid.cuts(self._widths, width, self._label))

    @property
    def height(self) -> int:
        """The number of lines, including the blank one after each block, the legend and the summary."""
        return len(self._cuts) * (len(self._lines) + 2) + (3 if self._remark else 2)

    def __iter__(self) -> Iterator[Text]:
        """Yield the blocks from left to right, then the legend and the summary."""
        for start, end in self._cuts:
            paint = _block if self._colour else _plain_block
            yield paint(self._lines, range(start, end), self._widths, self._label).append("\n")
        yield legend(self._schedule)
        yield Text(f"# {self._schedule.summary}")
        if self._remark:
            yield Text(f"# {self._remark}", "red")

    def _step_width(self, step: int) -> int:
        texts = [grid.cell_text(cells[step]) for cells in self._lines if step in cells]
        return max(map(len, [str(step), *texts]))


def _why_as_written(schedule: Schedule) -> str:
    """Return why a schedule is not aligned, if the reason is that it cannot run."""
    if schedule.lowered:
        return ""
    try:
        unit_steps(schedule)
    except ScheduleError as fact:
        return f"this schedule does not run: {fact}"
    return ""


def legend(schedule: Schedule) -> Text:
    """Return the meaning of the letters that appear in the drawing."""
    present = {part.computation_type for row in schedule.actions for cell in row if cell for part in cell.parts}
    text = Text("# ")
    for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
        if kind in present:
            text.append(f"{kind}", _style(kind)).append(f" {STYLES[style_name(kind)].meaning}   ")
    return text.append(grid.IDLE, _IDLE_STYLE).append(" idle")


def _block(lines: Sequence[grid.Line], steps: range, widths: Sequence[int], label: int) -> Text:
    text = Text(no_wrap=True)
    text.append(f"{'step':<{label}}", _IDLE_STYLE)
    for step in steps:
        text.append(f" {step:<{widths[step]}}", _IDLE_STYLE)
    for rank, cells in enumerate(lines):
        text.rstrip()
        text.append("\n")
        text.append(f"{f'rank {rank}':<{label}}")
        for step in steps:
            text.append(" ").append_text(_cell(cells[step]) if step in cells else Text())
            drawn = len(grid.cell_text(cells[step])) if step in cells else 0
            text.append(" " * (widths[step] - drawn))
    text.rstrip()
    return text


def _plain_block(lines: Sequence[grid.Line], steps: range, widths: Sequence[int], label: int) -> Text:
    """Draw a block without colour, which is many times faster; for pipes and files."""
    rows = [[f"{'step':<{label}}", *(f"{step:<{widths[step]}}" for step in steps)]]
    for rank, cells in enumerate(lines):
        texts = (grid.cell_text(cells[step]) if step in cells else "" for step in steps)
        drawn = [f"{text:<{widths[step]}}" for text, step in zip(texts, steps, strict=True)]
        rows.append([f"{f'rank {rank}':<{label}}", *drawn])
    return Text("\n".join(" ".join(row).rstrip() for row in rows), no_wrap=True)


def _cell(cell: Action | None) -> Text:
    if cell is None:
        return Text(grid.IDLE, _IDLE_STYLE)
    if cell.sub_actions is None:
        return Text(str(cell), _style(cell.computation_type))
    inner = Text(";").join(_cell(action) for action in cell.sub_actions)
    return Text("(").append_text(inner).append(f"){OVERLAP_F_B}", _IDLE_STYLE)


def _style(kind: ComputationType) -> str:
    return STYLES[style_name(kind)].terminal
