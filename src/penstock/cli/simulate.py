"""``penstock simulate``: predict the time and memory of a schedule, and where they go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from penstock.cli.costs import CostsFile, ModelName, PerRank, costs_from, format_number, naming_costs_file
from penstock.cli.source import (
    Json,
    Microbatches,
    Ranks,
    Source,
    StagesPerRank,
    build_fitted,
    parse_model,
    schedule_from,
)
from penstock.cli.terminal import Width, terminal
from penstock.lowering.pipeline import lower as lowered
from penstock.simulation.sampling import Samples, simulate_many
from penstock.simulation.simulate import simulate
from penstock.simulation.timeline import Timeline
from penstock.simulation.timeline_json import write_timeline
from penstock.view.palette import STYLES
from penstock.view.terminal import draw

PERCENTILES = (5, 50, 95)


def simulate_command(
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    costs: CostsFile = None,
    per_rank: PerRank = False,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Place weight gradients for these costs; for schedules that split the backward."),
    ] = False,
    model: ModelName = None,
    lower: Annotated[bool, typer.Option("--lower", help="Lower the schedule first, with sharding.")] = False,
    steps: Annotated[int, typer.Option("--steps", help="Number of consecutive steps.")] = 1,
    no_synchronise: Annotated[
        bool, typer.Option("--no-synchronise", help="Ranks do not wait for each other between steps.")
    ] = False,
    noise: Annotated[
        float, typer.Option("--noise", help="Relative standard deviation of action times, e.g. 0.1.")
    ] = 0.0,
    stragglers: Annotated[
        float, typer.Option("--stragglers", help="Relative standard deviation of rank speeds.")
    ] = 0.0,
    samples: Annotated[int, typer.Option("--samples", help="Number of random samples.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write a file: .html, .json (a trace), .png or .svg."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="FILE", help="Also keep the timeline (.json), for penstock compare and view."
        ),
    ] = None,
    width: Width = None,
    machine: Json = False,
) -> None:
    """Predict a schedule: time, bubble, memory, and the reason for every idle moment.

    Example: penstock simulate ZBVZeroBubble --ranks 4 --microbatches 8 -o timeline.html

    Example: penstock simulate ZBVZeroBubble --costs costs.toml --fit

    Example: penstock simulate 1F1B --ranks 2 --costs costs.toml --timeline predicted.json
    """
    schedule = schedule_from(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    console = terminal(width)
    given, behaves, together = costs_from(costs), None if model is None else parse_model(model), not no_synchronise
    with naming_costs_file(costs):
        given = given.of_ranks(schedule.placement) if per_rank else given
        schedule = build_fitted(source, schedule, given) if fit else schedule
        schedule = lowered(schedule) if lower else schedule
        timeline = simulate(schedule, given, model=behaves, steps=steps, synchronise=together)
    chance = None
    if noise or stragglers:
        with progress_bar(console, samples) as progress:
            chance = simulate_many(
                schedule, given, model=behaves, steps=steps, synchronise=together, samples=samples, noise=noise,
                stragglers=stragglers, seed=seed, progress=progress,
            )  # fmt: skip
    for path in output or []:
        timeline.write(path)
    if keep is not None:
        write_timeline(timeline, keep)
    if machine:
        typer.echo(json.dumps(facts(timeline, chance), indent=2))
        return
    paint(console, timeline)
    console.print()
    console.print(numbers(timeline))
    console.print(Text("\n".join(summary(timeline, chance))), soft_wrap=True)
    for path in [*(output or []), *([keep] if keep is not None else [])]:
        console.print(Text(f"wrote {path}"), soft_wrap=True)


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[], object] | None]:
    """Show a progress bar in the terminal, and yield a function that advances it; None for a pipe."""
    if not console.is_terminal:
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("simulating", total=total)
        yield lambda: bars.advance(task)


def paint(console: Console, timeline: Timeline) -> None:
    """Draw the timeline to scale, as wide as the terminal."""
    colour = console.color_system is not None and not console.no_color
    for line in draw(timeline, console.width, colour=colour):
        text = Text(no_wrap=True)
        for segment in line:
            style = STYLES.get(segment.style)
            text.append(segment.text, style=style.block if style else segment.style)
        console.print(text, soft_wrap=True)


def numbers(timeline: Timeline) -> Table:
    """Return a table with a row of numbers per rank."""
    table = Table(box=None, pad_edge=False)
    for title in ("rank", "busy", "idle", "communication", "peak memory"):
        table.add_column(title, justify="right")
    rows = zip(timeline.busy, timeline.idle, timeline.communication, timeline.peak_memory, strict=True)
    for rank, row in enumerate(rows):
        table.add_row(str(rank), *map(format_number, row))
    return table


def summary(timeline: Timeline, chance: Samples | None) -> list[str]:
    """Summarise the timeline in words."""
    lines = [
        f"makespan {format_number(timeline.makespan)}, of which {timeline.bubble_rate:.2%} is bubble; "
        f"span {format_number(timeline.span)}, {timeline.span_bubble_rate:.2%}; "
        f"a step takes {format_number(timeline.step_time)}"
    ]
    if causes := timeline.idle_by_cause:
        shares = ", ".join(f"{cause} {format_number(time)}" for cause, time in causes.items())
        lines.append(f"idle time of all ranks by cause: {shares}")
    if timeline.total_bytes_sent:
        lines.append(f"bytes sent by all ranks: {format_number(timeline.total_bytes_sent)}")
    if chance is not None:
        shown = ", ".join(f"{percent} % within {format_number(chance.percentile(percent))}" for percent in PERCENTILES)
        lines.append(f"makespan with random variation, {len(chance)} samples: {shown}")
    return lines


def facts(timeline: Timeline, chance: Samples | None = None) -> dict[str, Any]:
    """Return everything as JSON-compatible data."""
    found: dict[str, Any] = {
        "name": timeline.schedule.metadata.get("name"),
        "makespan": timeline.makespan,
        "span": timeline.span,
        "step_time": timeline.step_time,
        "ideal": timeline.ideal,
        "bubble": timeline.bubble,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "hops": timeline.hops,
        "ranks": [
            {"busy": busy, "idle": idle, "communication": communication, "peak_memory": peak, "bytes_sent": sent}
            for busy, idle, communication, peak, sent in zip(
                timeline.busy,
                timeline.idle,
                timeline.communication,
                timeline.peak_memory,
                timeline.bytes_sent,
                strict=True,
            )
        ],
        "idle_by_cause": timeline.idle_by_cause,
        "idle": [
            {"rank": wait.rank, "start": wait.start, "end": wait.end, "cause": wait.cause, "why": wait.why}
            for wait in timeline.waits
        ],
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end, "step": span.step}
            for span in timeline.critical_path
        ],
    }
    if chance is not None:
        found["samples"] = {"count": len(chance)} | {
            f"p{percent}": chance.percentile(percent) for percent in PERCENTILES
        }
    return found
