"""Reads and writes CSV as PyTorch does: a row per rank, a cell per step, an empty cell for an idle one.

A CSV file holds only the actions, so a schedule whose placement or number of microbatches cannot be inferred from its
actions is not written as CSV, and neither is one whose edges are not a chain.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from penstock.errors import FormatError, PlacementError, WriteError
from penstock.ir.actions import parse_cell
from penstock.ir.edges import chain
from penstock.ir.formats.rows import check_not_truncated, check_rows_suffice
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.ir.actions import Action


def schedule_from_csv(text: str) -> Schedule:
    """Read CSV by PyTorch or ``csv_from_schedule``. The last row may lack a line break if it is complete."""
    rows: list[list[Action | None]] = []
    blank: list[int] = []
    for number, row in _csv_rows(text):
        if not row:
            blank.append(number)
            continue
        if blank:
            raise FormatError("blank row; every row is a rank and needs at least one action", row=blank[0])
        rows.append([parse_cell(cell, row=number, cell=position) for position, cell in enumerate(row, start=1)])
    if not rows:
        raise FormatError("is empty; write a row per rank and a cell per action, e.g. '0F0,0F1,,0B0,0B1'")
    schedule = _build(rows)
    check_not_truncated(schedule, text)
    return schedule


def _build(rows: list[list[Action | None]]) -> Schedule:
    try:
        return Schedule(rows)
    except PlacementError as fact:
        rank, step = fact.places[-1] if fact.places else (None, None)
        row, cell = (None, None) if rank is None or step is None else (rank + 1, step + 1)
        raise FormatError(str(fact), row=row, cell=cell) from fact


def _csv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows with their line numbers."""
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            row = next(lines)
        except StopIteration:
            return
        except csv.Error as fault:
            raise FormatError(f"is not CSV: {fault}", row=max(1, lines.line_num)) from None
        yield lines.line_num, row


def csv_from_schedule(schedule: Schedule) -> str:
    """Return the CSV text of a schedule, with PyTorch's line endings."""
    if not schedule.is_chain:
        raise WriteError(
            f"PyTorch's CSV holds chains only, but the schedule has {_beyond_a_chain(schedule)}; "
            "write a .json or .txt file instead"
        )
    check_rows_suffice(schedule, "CSV")
    text = io.StringIO()
    csv.writer(text).writerows([["" if cell is None else str(cell) for cell in row] for row in schedule.actions])
    return text.getvalue()


def _beyond_a_chain(schedule: Schedule) -> str:
    """Name an edge that a chain does not have, or lacks."""
    usual = chain(schedule.stages)
    other = next((edge for edge in schedule.edges if edge._replace(value="") not in usual), None)
    if other is not None:
        return f"edge {other}"
    missing = next((edge for edge in usual if edge not in {each._replace(value="") for each in schedule.edges}), None)
    return "two values on one edge" if missing is None else f"no edge {missing}"
