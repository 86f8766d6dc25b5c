"""Tables of one part of a benchmark, with its goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from goals import Goal


@dataclass
class Report:
    """The results of one part. A row maps columns to figures."""

    part: str
    title: str
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"({self.part}) {self.title}", *(f"    {note}" for note in self.notes), ""]
        return "\n".join([*lines, *_tables(self.rows), "", *map(str, self.goals)])

    def as_data(self) -> dict[str, Any]:
        """For machines."""
        return {
            "part": self.part,
            "title": self.title,
            "notes": self.notes,
            "rows": [{name: _plain(value) for name, value in row.items()} for row in self.rows],
            "goals": [{**asdict(goal), "met": goal.met} for goal in self.goals],
        }


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _tables(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table for each run of rows with the same columns."""
    lines: list[str] = []
    begin = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or list(rows[end]) != list(rows[begin]):
            lines += [*([""] if begin else []), *_table(rows[begin:end])]
            begin = end
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
