"""What the formats have in common that hold rows of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import PenstockError, ReadError, WriteError
from penstock.ir.actions import parse_cell
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from penstock.ir.actions import Action


def located_cell(text: str, row: int, cell: int) -> Action | None:
    """Parse a cell; an error says in which row and cell it is, both counted from 1."""
    try:
        return parse_cell(text)
    except ReadError as error:
        raise error.at(row=row, cell=cell) from None


def check_rows_tell_all(schedule: Schedule, target: str) -> None:
    """Refuse to drop what the rows of actions alone do not say."""
    try:
        alone = Schedule.from_codes([schedule.codes_of(rank) for rank in range(schedule.ranks)])
    except PenstockError as fact:
        raise WriteError(f"{target} holds rows of actions only, and {fact}; write it as .json") from None
    if alone != schedule:
        lost = "placement" if alone.placement != schedule.placement else f"{schedule.microbatches} microbatches"
        raise WriteError(f"{target} holds rows of actions only, and they do not tell the {lost}; write it as .json")
