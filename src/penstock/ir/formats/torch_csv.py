"""CSV as PyTorch writes and reads it: a row per rank, a cell per step, an empty cell for an idle one.

A CSV file holds the actions and nothing else, so a schedule whose placement or number of microbatches cannot be told
from its actions is not written as one.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import FormatError
from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.ir.formats.rows import check_rows_tell_all, located_cell
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.ir.actions import Action

LARGEST_LINE: Final = 1 << 25


def schedule_from_csv(text: str) -> Schedule:
    """Read what PyTorch, or ``csv_from_schedule``, wrote. The last row may end without a line break if it is whole."""
    rows: list[list[Action | None]] = []
    blank: list[int] = []
    for number, row in _csv_rows(text):
        if not row:
            blank.append(number)
            continue
        if blank:
            raise FormatError("the row is blank; a row is a rank, and it has at least one action", row=blank[0])
        rows.append([located_cell(cell, number, position) for position, cell in enumerate(row, start=1)])
    if not rows:
        raise FormatError("is empty; a row is a rank, and a cell an action, as in '0F0,0F1,,0B0,0B1'")
    schedule = Schedule(rows)
    if not text.endswith(("\n", "\r")):
        _check_not_cut_off(schedule)
    return schedule


def _csv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """The rows with their line numbers."""
    lines = csv.reader(_short_lines(text), strict=True)
    while True:
        try:
            row = next(lines)
        except StopIteration:
            return
        except csv.Error as fault:
            raise FormatError(f"is not CSV: {fault}", row=max(1, lines.line_num)) from None
        yield lines.line_num, row


def _short_lines(text: str) -> Iterator[str]:
    for number, line in enumerate(io.StringIO(text, newline=""), start=1):
        if len(line) > LARGEST_LINE:
            raise FormatError(f"the row is longer than {LARGEST_LINE >> 20} Mi characters", row=number)
        yield line


#: Each stage of a whole schedule does each of these once for every microbatch.
_ONCE: Final = {
    "forward": (FORWARD,),
    "backward": (FULL_BACKWARD, BACKWARD_INPUT),
    "weight gradient": (FULL_BACKWARD, BACKWARD_WEIGHT),
}


def _check_not_cut_off(schedule: Schedule) -> None:
    """A file whose last line does not end is whole only if every stage has done as much as the others, each once.

    (What is left of a cut ``1B12`` may be ``1B1``.)
    """
    for noun, kinds in _ONCE.items():
        chosen = schedule.codes[np.isin(packed.types(schedule.codes), [packed.TYPE_NUMBER[kind] for kind in kinds])]
        stages, microbatches = packed.stages(chosen), packed.microbatches(chosen)
        counts = np.bincount(stages, minlength=schedule.stages)
        least, most = counts.argmin(), counts.argmax()
        reason = ""
        if counts[least] < counts[most]:
            reason = f"stage {least} has {counts[least]} {noun}s where stage {most} has {counts[most]}"
        elif len(np.unique(packed.pack(stages, FORWARD, microbatches))) < len(chosen):
            reason = f"a stage has the {noun} of one microbatch twice"
        if reason:
            raise FormatError(
                f"seems cut off: its last row does not end, and {reason}; if it is whole, add a line break",
                row=schedule.ranks,
            )


def csv_from_schedule(schedule: Schedule) -> str:
    """The CSV text of a schedule; lines end as PyTorch's do."""
    check_rows_tell_all(schedule, "CSV")
    text = io.StringIO()
    csv.writer(text).writerows([["" if cell is None else str(cell) for cell in row] for row in schedule.actions])
    return text.getvalue()
