"""``penstock show``: draw a schedule in the terminal."""

from __future__ import annotations

import json
import os
import signal
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.drawing import GridDrawing
from penstock.cli.lowering import DeferReceives, LookAhead, Lower, Lowering, MergeBackward, NoUnshard
from penstock.cli.source import Json, Microbatches, Ranks, StagesPerRank, schedule_from
from penstock.cli.terminal import Width, layout_width, terminal
from penstock.ir.formats.versioned_json import json_from_schedule
from penstock.ir.grid import edges_line
from penstock.schedules.registry import RECIPES


def show(
    source: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", help="A schedule or a file. Omit it to list the schedules.")
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    lower: Lower = False,
    defer_receives: DeferReceives = False,
    look_ahead: LookAhead = None,
    merge_backward: MergeBackward = False,
    no_unshard: NoUnshard = False,
    as_written: Annotated[
        bool, typer.Option("--as-written", help="Draw the rows cell by cell, instead of aligning dependent actions.")
    ] = False,
    width: Width = None,
    machine: Json = False,
) -> None:
    """Draw a schedule: a line per rank, a column per step.

    A drawing that is taller than the terminal goes through $PAGER.

    Example: penstock show ZBVZeroBubble --ranks 4 --microbatches 8

    Example: penstock show 1F1B --ranks 2 --lower --no-unshard
    """
    console = terminal(width)
    if source is None:
        sizes = {"ranks": ranks, "microbatches": microbatches, "stages-per-rank": stages_per_rank}
        _check_nothing_asked({**sizes, "lower": lower, "as-written": as_written})
        _list(console, machine=machine)
        return
    schedule = schedule_from(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    schedule = Lowering(lower, defer_receives, look_ahead, merge_backward, no_unshard).of(schedule)
    if machine:
        typer.echo(json_from_schedule(schedule), nl=False)
        return
    drawing = GridDrawing(
        schedule,
        aligned=False if as_written else None,
        width=layout_width(console, width),
        colour=console.color_system is not None and not console.no_color,
    )
    if not schedule.is_chain:
        typer.echo(edges_line(schedule.edges))
    page(console, drawing)


def page(console: Console, drawing: GridDrawing) -> None:
    """Print the drawing, through a pager if it is taller than the terminal."""
    if console.is_terminal and drawing.height >= console.height:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # leaving the pager early is not an error
        os.environ.setdefault("LESS", "-RSFX")  # colours as colours, long lines not folded
        click.echo_via_pager((_ansi(console, part, fold=drawing.is_folded) for part in drawing), color=True)
    else:
        echo(console, drawing)


def echo(console: Console, drawing: GridDrawing) -> None:
    """Print the drawing, however tall it is."""
    for part in drawing:
        typer.echo(_ansi(console, part, fold=drawing.is_folded), nl=False, color=True)


def _ansi(console: Console, text: Text, *, fold: bool) -> str:
    """Return the text with the colours that this console can show: none if it is a pipe."""
    if console.color_system is None or console.no_color:
        text = Text(text.plain, no_wrap=text.no_wrap)
    with console.capture() as captured:
        console.print(text, soft_wrap=text.no_wrap or not fold)
    return captured.get()


def _check_nothing_asked(options: dict[str, object]) -> None:
    """Refuse options that need a schedule."""
    for option, value in options.items():
        if value is not None and value is not False:
            raise typer.BadParameter("needs a schedule, e.g. penstock show 1F1B --ranks 4", param_hint=f"--{option}")


def _list(console: Console, *, machine: bool) -> None:
    if machine:
        known = [
            {
                "name": recipe.name,
                "stages_per_rank": recipe.stages_per_rank,
                "any_stages_per_rank": recipe.any_stages,
                "fits_costs": recipe.fits_costs,
                "summary": recipe.summary,
            }
            for recipe in RECIPES
        ]
        typer.echo(json.dumps(known, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule", style="bold")
    table.add_column("stages per rank", justify="center")
    table.add_column("what it does")
    for recipe in RECIPES:
        stages = f"any ({recipe.stages_per_rank})" if recipe.any_stages else str(recipe.stages_per_rank)
        table.add_row(recipe.name, stages, recipe.summary)
    console.print(table)
    console.print("\nDraw one: penstock show 1F1B --ranks 4 --microbatches 8")
