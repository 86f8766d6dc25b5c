"""``penstock compare``: compare every known schedule at one size, or a measured timeline with a predicted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from penstock.cli.costs import CostsFile, ModelName, costs_from, format_number
from penstock.cli.source import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    Json,
    Microbatches,
    Ranks,
    StagesPerRank,
    parse_model,
)
from penstock.cli.terminal import Width, terminal
from penstock.cli.timelines import compare_timelines
from penstock.schedules.registry import RECIPES
from penstock.simulation.comparison import Candidate, candidates, rank_candidates

#: The number of forwards above which a progress bar is shown.
_LARGE = 20_000


def compare(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PREDICTED MEASURED]", help="Two timelines to compare instead.", show_default=False),
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    costs: CostsFile = None,
    model: ModelName = None,
    memory_limit: Annotated[float | None, typer.Option("--memory-limit", min=0.0, help="Memory of a rank.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with both timelines.")
    ] = None,
    save_costs: Annotated[
        Path | None,
        typer.Option("--save-costs", metavar="FILE", help="Write the costs of the measured timeline (.toml or .json)."),
    ] = None,
    width: Width = None,
    machine: Json = False,
) -> None:
    """Compare all schedules: makespan, span, bubble, memory, transfers. The fastest first.

    Costs are those of whole ranks, one number for all or a list with one per rank. The stages of a rank share them
    equally, so that schedules with different numbers of stages per rank are comparable. Memory is in the unit of the
    costs; by default, in the activations of one microbatch on a whole rank. Hops are the transfers between ranks per
    microbatch. A schedule that splits the backward appears a second time, fitted, if its weight gradients can be placed
    better for these costs. The exit code is 1 if no schedule fits.

    Example: penstock compare --ranks 8 --microbatches 24 --memory-limit 8

    Given two timelines, what was predicted and what was measured, compare these: time, bubble, what each rank is busy
    and idle with, and the actions that took longest over their prediction. Simulate with the costs of --save-costs to
    predict the next run.

    Example: penstock compare predicted.json measured.json --html both.html --save-costs costs.toml
    """
    if files:
        compare_timelines(files, html=html, costs=save_costs, console=terminal(width), machine=machine)
        return
    if html is not None or save_costs is not None:
        option = "--html" if html is not None else "--save-costs"
        raise typer.BadParameter(
            "is for two timelines: penstock compare predicted.json measured.json", param_hint=option
        )
    size = (
        DEFAULT_RANKS if ranks is None else ranks,
        DEFAULT_MICROBATCHES if microbatches is None else microbatches,
    )
    console = terminal(width)
    found = candidates(
        *size,
        costs_from(costs),
        stages_per_rank=stages_per_rank,
        memory_limit=memory_limit,
        model=None if model is None else parse_model(model),
    )
    if size[0] * size[1] > _LARGE and console.is_terminal and not machine:
        waiting = Console(stderr=True)
        most = sum(1 + recipe.fits_costs for recipe in RECIPES) - 1
        found = iter(track(found, "simulating", total=most, console=waiting, transient=True))
    rows = rank_candidates(list(found))
    if machine:
        typer.echo(json.dumps([_facts(row) for row in rows], indent=2))
    else:
        simulated = [row for row in rows if row.timeline]
        if simulated:
            console.print(_table(simulated, memory_limit, console.width))
        for row in rows:
            if row.timeline is None:
                console.print(Text(f"not {row.name}: {row.reason}", style="dim"), soft_wrap=True)
        if rows[0].reason:
            console.print("no schedule fits the limit" if simulated else "no schedule fits these costs")
    if rows[0].reason:
        raise typer.Exit(1)


#: The columns, and their priority if there is no room for all.
_COLUMNS = {
    "stages": 2, "makespan": 9, "bubble": 8, "span": 4, "of it": 3, "memory": 7, "hops": 1,
}  # fmt: skip


def _table(rows: list[Candidate], memory_limit: float | None, width: int) -> Table:
    cells = [_numbers(row, memory_limit) for row in rows]
    titles = list(_COLUMNS)
    name = max(len(row.name) for row in rows)
    widths = [max(map(len, [title, *column])) for title, column in zip(titles, zip(*cells, strict=True), strict=True)]
    shown = set(titles)
    for title in sorted(titles, key=_COLUMNS.__getitem__):
        if 3 + name + sum(2 + size for size, each in zip(widths, titles, strict=True) if each in shown) > width:
            shown.remove(title)
    table = Table(box=None, pad_edge=False)
    for title in ("", "schedule"):
        table.add_column(title, no_wrap=True)
    for title in (title for title in titles if title in shown):
        table.add_column(title, justify="right", no_wrap=True)
    for place, (row, numbers) in enumerate(zip(rows, cells, strict=True)):
        best = place == 0 and not row.reason
        style = "dim" if row.reason else "bold" if best else ""
        chosen = [number for number, title in zip(numbers, titles, strict=True) if title in shown]
        table.add_row("*" if best else "", row.name, *chosen, style=style)
    return table


def _numbers(row: Candidate, memory_limit: float | None) -> list[str]:
    """Return the content of the columns."""
    assert row.timeline is not None
    timeline = row.timeline
    over = f" > {format_number(memory_limit)}" if row.reason and memory_limit is not None else ""
    return [
        str(row.stages_per_rank),
        format_number(timeline.makespan),
        f"{timeline.bubble_rate:.1%}",
        format_number(timeline.span),
        f"{timeline.span_bubble_rate:.1%}",
        format_number(row.peak_memory) + over,
        f"{timeline.hops:g}",
    ]


def _facts(row: Candidate) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": row.name,
        "stages_per_rank": row.stages_per_rank,
        "fits": not row.reason,
        "reason": row.reason or None,
    }
    if row.timeline is not None:
        facts |= {
            "makespan": row.timeline.makespan,
            "bubble_rate": row.timeline.bubble_rate,
            "span": row.timeline.span,
            "span_bubble_rate": row.timeline.span_bubble_rate,
            "peak_memory": list(row.timeline.peak_memory),
            "hops": row.timeline.hops,
        }
    return facts
