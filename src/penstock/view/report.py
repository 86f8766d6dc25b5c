"""Writes a report: texts, tables, curves and timelines below each other, in one self-contained HTML file.

Timelines are whole pages in frames, so they can be explored. Like them, a report makes no requests: its content
policy allows only the scripts and styles that are in it, by their hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from string import Template
from typing import TYPE_CHECKING, Final

from penstock.ir.formats.files import atomic_file
from penstock.view.curve import curve_of
from penstock.view.page import Page, policy_of, read_asset

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.simulation.timeline import Timeline

#: The height of a frame in pixels: what is above and below the ranks, a rank with its memory, and the most.
_HEADER: Final = 280
_ROW: Final = 84
_HIGHEST: Final = 1100


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str

    def html(self) -> str:
        """Return the paragraph."""
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Rows:
    """A table. Columns whose cells are all numbers with a unit, or empty, are aligned to the right.

    Attributes:
        columns: the titles of the columns.
        rows: the cells of each row, as text.
        marked: the number of a row to emphasize, such as the one that was chosen.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None

    def html(self) -> str:
        """Return the table."""
        sides = [
            ' class="number"' if all(_is_number(row[column]) for row in self.rows) else ""
            for column in range(len(self.columns))
        ]
        marks = [' class="marked"' if number == self.marked else "" for number in range(len(self.rows))]
        head = _row("th", "", self.columns, sides)
        body = "\n".join(_row("td", mark, row, sides) for mark, row in zip(marks, self.rows, strict=True))
        return (
            '<div class="wide" tabindex="0" role="region" aria-label="Table">'
            f"<table><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>"
        )


@dataclass(frozen=True)
class Curve:
    """A curve through points.

    Attributes:
        points: the points; one that is not finite leaves a gap.
        x: what the first numbers are.
        y: what the second numbers are.
    """

    points: Sequence[tuple[float, float]]
    x: str
    y: str

    def html(self) -> str:
        """Return the drawing."""
        return curve_of(self.points, x=self.x, y=self.y)


@dataclass(frozen=True)
class Timelines:
    """Timelines above each other on one time axis.

    Attributes:
        page: the page that shows them.
        rows: the number of their ranks.
    """

    page: Page
    rows: int

    @classmethod
    def of(
        cls, timelines: Sequence[Timeline], titles: Sequence[str], *, memory_limit: float | None = None
    ) -> Timelines:
        """Draw timelines."""
        rows = sum(timeline.schedule.ranks for timeline in timelines)
        return cls(Page.of(timelines, titles=titles, memory_limit=memory_limit), rows)

    def html(self) -> str:
        """Return a frame with the page."""
        title = f"Timeline: {', '.join(self.page.titles)}"
        height = min(_HEADER + _ROW * self.rows, _HIGHEST)
        return f'<iframe title="{escape(title)}" height="{height}" srcdoc="{escape(self.page.text)}"></iframe>'


Part = Paragraph | Rows | Curve | Timelines


@dataclass(frozen=True)
class Section:
    """A title, and what is below it."""

    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        """Return the section."""
        return "\n".join(
            ["<section>", f"<h2>{escape(self.title)}</h2>", *(part.html() for part in self.parts), "</section>"]
        )


def write_report(path: str | Path, title: str, sections: Sequence[Section]) -> None:
    """Write a report to a file; an existing one is replaced.

    Raises:
        WriteError: the file cannot be written.
    """
    report = report_of(title, sections)
    with atomic_file(path) as file:
        file.write(report.encode())


def report_of(title: str, sections: Sequence[Section]) -> str:
    """Return the text of a report."""
    style = read_asset("report.css")
    # A frame inherits the policy of the report.
    pages = [part.page for section in sections for part in section.parts if isinstance(part, Timelines)]
    return Template(read_asset("report.html")).substitute(
        policy=policy_of(scripts=[page.script for page in pages], styles=[style, *(page.style for page in pages)]),
        style=style,
        title=escape(title),
        sections="\n".join(section.html() for section in sections),
    )


def _row(tag: str, mark: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    drawn = (f"<{tag}{side}>{escape(cell)}</{tag}>" for side, cell in zip(sides, cells, strict=True))
    return f"<tr{mark}>{''.join(drawn)}</tr>"


def _is_number(cell: str) -> bool:
    """Return whether a cell is a number, with a unit or without, or empty.

    >>> [_is_number(cell) for cell in ("12.5 ms", "-3%", "1,024", "", "1F1B", "2 per rank")]
    [True, True, True, True, False, False]
    """
    number, *unit = cell.split(" ") if cell else ("0",)
    return len(unit) < 2 and number.rstrip("%").replace(",", "").lstrip("+-").replace(".", "", 1).isdigit()
