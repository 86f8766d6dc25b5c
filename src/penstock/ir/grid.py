"""Draws a schedule as a text grid, with a line per rank and a column per step, and reads it back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from penstock.errors import ScheduleError, ScheduleSyntaxError
from penstock.ir import packed
from penstock.ir.actions import Action, parse_cell
from penstock.ir.alignment import unit_steps
from penstock.ir.edges import Edge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.ir.packed import Codes
    from penstock.ir.schedule import Schedule

IDLE: Final = "."

#: A cell to point at, as (rank, step).
Mark: TypeAlias = tuple[int, int]

#: A line of a drawing: the cell in each column.
Line: TypeAlias = dict[int, Action | None]


def draw(
    schedule: Schedule,
    *,
    aligned: bool | None = None,
    mark: Mark | Sequence[Mark] | None = None,
    message: str = "",
    ranks: range | None = None,
    steps: range | None = None,
    width: int | None = None,
) -> str:
    """Draw the grid; see ``Schedule.grid``. With a width it is folded into blocks of steps, one below the other."""
    marks = _marks(mark)
    shown = range(schedule.ranks) if ranks is None else ranks
    if unknown := [rank for rank in (*shown, *marks) if rank not in range(schedule.ranks)]:
        raise ScheduleError(f"cannot draw rank {unknown[0]}; the ranks are 0 to {schedule.ranks - 1}")
    columns = cell_columns(schedule, aligned=aligned, marked=bool(marks))
    lines = {rank: line(schedule, rank, columns, steps) for rank in shown}
    window = sorted({column for cells in lines.values() for column in cells})
    widths = {column: _width(column, lines.values()) for column in window}
    label = max(len("step"), len(f"rank {max(shown, default=0)}"))

    pointers = {rank: _pointed(rank, steps, columns, widths) for rank, steps in marks.items() if rank in lines}
    blocks = [
        {column: widths[column] for column in window[start:end]}
        for start, end in cuts([*widths.values()], width, label)
    ]
    return "\n\n".join(_block(lines, pointers, message, label, block) for block in blocks or [{}])


def cuts(widths: Sequence[int], width: int | None, label: int) -> Iterator[tuple[int, int]]:
    """Yield where to cut so that each block fits, counting a label and a space before every cell."""
    start, used = 0, label
    for step, cell in enumerate(widths):
        if width is not None and step > start and used + cell + 1 > width:
            yield start, step
            start, used = step, label
        used += cell + 1
    if widths:
        yield start, len(widths)


def _block(
    lines: Mapping[int, Line],
    pointers: Mapping[int, Mapping[int, str]],
    message: str,
    label: int,
    widths: Mapping[int, int],
) -> str:
    """Draw the columns in ``widths`` for all ranks, with a line of pointers under each rank that has marks."""
    drawn = [_joined("step", label, {column: str(column) for column in widths}, widths)]
    for rank, cells in lines.items():
        texts = {column: cell_text(cells[column]) for column in widths if column in cells}
        drawn.append(_joined(f"rank {rank}", label, texts, widths))
        if any(column in widths for column in pointers.get(rank, ())):
            arrows = _joined("", label, pointers[rank], widths)
            drawn.append(f"{arrows} {' '.join(message.split())}".rstrip())
    return "\n".join(drawn)


def cell_columns(
    schedule: Schedule, *, aligned: bool | None = None, marked: bool = False
) -> list[list[int | None]] | None:
    """Return the column of every cell of every rank, None for an idle step; or None to draw the rows as written."""
    if aligned is False:
        return None
    if aligned is None and (marked or schedule.lowered or packed.IDLE in schedule.codes):
        return None
    try:
        return unit_steps(schedule)
    except ScheduleError:
        if aligned:
            raise
        return None


def line(
    schedule: Schedule, rank: int, columns: list[list[int | None]] | None = None, steps: range | None = None
) -> Line:
    """Return the cells of a rank by column, with idle steps where it waits; only these steps, if given."""
    if columns is None:
        return _as_written(schedule.codes_of(rank), steps)
    cells: Line = {}
    for cell, column in zip(schedule.actions[rank], columns[rank], strict=True):
        if column is not None:
            cells.update(dict.fromkeys(range(len(cells), column)))
            cells[column] = cell
    return cells if steps is None else {column: cell for column, cell in cells.items() if column in steps}


def _as_written(codes: Codes, steps: range | None) -> Line:
    """Unpack only what is shown: a schedule may have a million actions."""
    starts = packed.cell_starts(codes)
    first, last = (0, len(starts)) if steps is None else (max(0, steps.start), min(len(starts), steps.stop))
    if first >= last:
        return {}
    end = starts[last] if last < len(starts) else len(codes)
    return dict(enumerate(packed.unpack_cells(codes[starts[first] : end]), start=first))


def _column(columns: Sequence[int | None], step: int) -> int | None:
    return columns[step] if 0 <= step < len(columns) else None


def cell_text(cell: Action | None) -> str:
    """Return the text of a cell."""
    return IDLE if cell is None else str(cell)


def _width(column: int, lines: Iterable[Line]) -> int:
    texts = [cell_text(cells[column]) for cells in lines if column in cells]
    return max(map(len, [str(column), *texts]))


def _joined(label: str, label_width: int, texts: Mapping[int, str], widths: Mapping[int, int]) -> str:
    cells = [f"{texts.get(column, ''):<{width}}" for column, width in widths.items()]
    return " ".join([f"{label:<{label_width}}", *cells]).rstrip()


def _marks(mark: Mark | Sequence[Mark] | None) -> dict[int, list[int]]:
    """Group the marked steps by rank."""
    several = (mark,) if mark and not isinstance(mark[0], tuple) else mark or ()
    marks: dict[int, list[int]] = {}
    for rank, step in cast("Sequence[Mark]", several):
        if step not in marks.setdefault(rank, []):
            marks[rank].append(step)
    return marks


def _pointed(
    rank: int, steps: Iterable[int], columns: list[list[int | None]] | None, widths: Mapping[int, int]
) -> dict[int, str]:
    """Return the pointers at some steps of a rank, by column."""
    arrows = {}
    for step in steps:
        column = step if columns is None else _column(columns[rank], step)
        if column is None or column not in widths:
            raise ScheduleError(f"cannot mark step {step} of rank {rank}: it is not in this grid")
        arrows[column] = "^" * widths[column]
    return arrows


_LABEL: Final = re.compile(r"rank[ \t]+([0-9]{1,9})[ \t]*(?::|[ \t]|$)[ \t]*", re.IGNORECASE)
_EDGES: Final = "edges:"
_EDGE: Final = re.compile(r"([0-9]{1,9})>([0-9]{1,9}(?:,[0-9]{1,9})*)(/F)?")
_HEADER: Final = re.compile(r"steps?\b[ \t0-9:]*", re.IGNORECASE)


def parse_grid(text: str) -> tuple[list[list[Action | None]], list[Edge] | None]:
    r"""Parse the rows of a grid, in rank order, and its line of edges, if any; the inverse of drawing it as written.

    >>> parse_grid("rank 1: . 1F0\nrank 0: 0F0 .")
    ([[0F0, None], [None, 1F0]], None)
    """
    if not isinstance(text, str):
        raise ScheduleSyntaxError(f"a grid must be text, got {text!r}", text=repr(text))
    rows: dict[int, list[Action | None]] = {}
    edges: list[Edge] | None = None
    labels: set[bool] = set()
    for number, content in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        row = content.strip(" \t\r")
        if not row or row.startswith("#") or _HEADER.fullmatch(row):
            continue
        if row.lower().startswith(_EDGES):
            if edges is not None:
                raise ScheduleSyntaxError("duplicate line of edges", text=content, row=number)
            edges = _parsed_edges(row, number)
            continue
        label = _LABEL.match(row)
        labels.add(label is not None)
        if len(labels) > 1:
            raise ScheduleSyntaxError(
                "label every row with its rank, as in 'rank 0: 0F0 0B0', or none",
                text=content,
                row=number,
            )
        rank = int(label.group(1)) if label else len(rows)
        if rank in rows:
            raise ScheduleSyntaxError(f"duplicate row for rank {rank}", text=content, row=number)
        rows[rank] = _cells(row[label.end() :] if label else row, number)
    if not rows:
        raise ScheduleSyntaxError("no rows found; write e.g. 'rank 0: 0F0 0B0'", text=text[:80])
    return _in_order(rows), edges


def edges_line(edges: Iterable[Edge]) -> str:
    """Return the line that ``parse_grid`` reads these edges from; it has no names of values.

    >>> edges_line([Edge(0, (1, 3)), Edge(0, (2,), "mask", gradient=False)])
    'edges: 0>1,3 0>2/F'
    """
    return " ".join([_EDGES, *(str(edge._replace(value="")) for edge in edges)])


def _parsed_edges(row: str, number: int) -> list[Edge]:
    edges = []
    for position, text in enumerate(row[len(_EDGES) :].split(), start=1):
        if not (found := _EDGE.fullmatch(text)):
            message = f"{text!r} is not an edge; write e.g. '0>1', '0>1,3', or '0>3/F' for one without a gradient"
            raise ScheduleSyntaxError(message, text=row, row=number, cell=position)
        source, targets, forward_only = found.groups()
        edges.append(Edge(int(source), tuple(map(int, targets.split(","))), gradient=not forward_only))
    return edges


def _cells(row: str, number: int) -> list[Action | None]:
    cells = []
    for position, text in enumerate(re.findall(r"[^ \t]+", row), start=1):
        if position == 1 and text.lower().startswith("rank"):
            raise ScheduleSyntaxError(
                f"{text!r} is not a row label; write e.g. 'rank 0: 0F0 0B0'", text=row, row=number, cell=1
            )
        cells.append(None if text == IDLE else parse_cell(text, row=number, cell=position))
    return cells


def _in_order(rows: Mapping[int, list[Action | None]]) -> list[list[Action | None]]:
    for rank in range(len(rows)):
        if rank not in rows:
            raise ScheduleSyntaxError(f"there are {len(rows)} rows, but rank {rank} has none", text="")
    return [rows[rank] for rank in range(len(rows))]
