"""Compares two timeline files: a table, JSON, and both on one page. Part of ``penstock compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.costs import format_number
from penstock.errors import FormatError, ReadError
from penstock.simulation.difference import ActionRow, Difference, Row
from penstock.simulation.timeline import Timeline
from penstock.simulation.timeline_json import is_timeline, read_timeline
from penstock.simulation.traces import read_traces, timeline_of
from penstock.view.page import write_page

#: How many actions are listed.
_WORST: Final = 5


def is_timeline_source(source: str) -> bool:
    """Return whether this is a timeline file, or a folder of traces."""
    return is_timeline(source) or Path(source).is_dir()


def read_timeline_source(source: str) -> Timeline:
    """Read a timeline file, or the first schedule in a folder of traces."""
    if not Path(source).is_dir():
        return read_timeline(source)
    groups = read_traces(source)
    if not groups:
        raise FormatError("holds no trace of all ranks of a pipeline; see PENSTOCK_TRACE", path=source)
    return timeline_of(groups[0])


def compare_timelines(
    sources: list[str], *, html: Path | None, costs: Path | None, console: Console, machine: bool
) -> None:
    """Compare a predicted with a measured timeline, and write what was asked for."""
    if len(sources) != 2:
        raise typer.BadParameter(f"expected two timelines, got {len(sources)}", param_hint="FILES")
    for source in sources:
        if not is_timeline_source(source):
            if not Path(source).exists():
                raise ReadError(f"{source} does not exist")
            raise ReadError(
                f"{source} is not a timeline; write one with penstock simulate or plan and --timeline predicted.json"
            )
    found = Difference(*map(read_timeline_source, sources))
    if html is not None:
        write_page([found.predicted, found.measured], html, titles=[Path(source).name for source in sources])
    if costs is not None:
        found.measured.costs.write(costs)
    written = [str(path) for path in (html, costs) if path is not None]
    if machine:
        typer.echo(json.dumps({**_facts(found), "wrote": written}, indent=2))
        return
    console.print(_table(found))
    console.print()
    console.print(_worst(found.actions[:_WORST]))
    for path in written:
        console.print(Text(f"wrote {path}"), soft_wrap=True)


def _table(found: Difference) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in ("predicted", "measured", "difference"):
        table.add_column(title, justify="right")
    for row in found.totals:
        table.add_row(row.name, *_cells(row, is_share=row.name == "bubble"), style="bold")
    for rank, rows in enumerate(found.ranks):
        for row in rows:
            name = f"rank {rank} {row.name}" if row.name in ("busy", "idle") else f"  {row.name}"
            table.add_row(name, *_cells(row), style="" if row.name in ("busy", "idle") else "dim")
    return table


def _cells(row: Row, *, is_share: bool = False) -> tuple[str, str, str]:
    if is_share:
        return f"{row.predicted:.1%}", f"{row.measured:.1%}", f"{100 * (row.measured - row.predicted):+.1f} points"
    difference = "" if row.difference is None else f"{row.difference:+.1%}"
    return _number(row.predicted), _number(row.measured), difference


def _number(number: float) -> str:
    """Format with four digits: measurements have no more."""
    return format_number(float(f"{number:.4g}"))


def _worst(rows: tuple[ActionRow, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("longest over", "rank", "predicted", "measured", "longer by", "ends later by"):
        table.add_column(title, justify="left" if title == "longest over" else "right")
    for row in rows:
        figures = (row.predicted, row.measured, row.longer, row.late)
        table.add_row(str(row.action), str(row.rank), *map(_number, figures))
    return table


def _facts(found: Difference) -> dict[str, Any]:
    def pair(row: Row) -> dict[str, float | None]:
        return {"predicted": row.predicted, "measured": row.measured, "difference": row.difference}

    return {
        **{row.name: pair(row) for row in found.totals},
        "ranks": [{row.name: pair(row) for row in rows} for rows in found.ranks],
        "actions": [
            {
                "rank": row.rank,
                "action": str(row.action),
                "predicted": row.predicted,
                "measured": row.measured,
                "late": row.late,
            }
            for row in found.actions
        ],
    }
