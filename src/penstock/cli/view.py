"""``penstock view``: write an interactive page of one schedule, or of several on one time axis."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.costs import CostsFile, ModelName, PerRank, costs_from, naming_costs_file
from penstock.cli.source import Json, Microbatches, Ranks, StagesPerRank, is_file, parse_model, schedule_from
from penstock.cli.timelines import is_timeline_source, read_timeline_source
from penstock.errors import WriteError
from penstock.simulation.simulate import simulate
from penstock.view.page import write_page


def view(
    sources: Annotated[
        list[str], typer.Argument(metavar="NAME|FILE...", help="Schedules, timelines, or files of them.")
    ],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    costs: CostsFile = None,
    per_rank: PerRank = False,
    model: ModelName = None,
    memory_limit: Annotated[
        float | None, typer.Option("--memory-limit", min=0.0, help="Memory of a rank, drawn as a line.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "timeline.html"
    ),
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    machine: Json = False,
) -> None:
    """Write an interactive page of schedules and timelines: zoom, hover, click. It is a single, self-contained file.

    Several schedules are shown below each other on one time axis. As in penstock compare, costs are then those of whole
    ranks, shared equally by their stages. Sizes apply to named schedules; files have their own.

    Timelines are files of penstock run --trace, simulate --timeline or write_timeline, or a folder of traces.

    Example: penstock view 1F1B ZBVZeroBubble --ranks 4 --microbatches 8 -o compare.html

    Example: penstock view predicted.json measured.json
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise WriteError(f"{output}: a page must be *.html; for other formats, use penstock simulate -o")
    given, behaves = costs_from(costs), None if model is None else parse_model(model)
    named_ones = [source for source in sources if not is_timeline_source(source) and not is_file(source)]
    timelines, titles = [], []
    for source in sources:
        if is_timeline_source(source):
            timelines.append(read_timeline_source(source))
            titles.append(Path(source).name)
            continue
        own = is_file(source) and bool(named_ones)
        sizes = {} if own else {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
        schedule = schedule_from(source, **sizes)
        with naming_costs_file(costs):
            shared = given.of_ranks(schedule.placement) if per_rank or len(sources) > 1 else given
            timelines.append(simulate(schedule, shared, model=behaves))
        titles.append(Path(source).name if is_file(source) else str(schedule.metadata["name"]))
    write_page(timelines, output, titles=titles, memory_limit=memory_limit)
    if show:
        webbrowser.open(output.resolve().as_uri())
    typer.echo(json.dumps({"wrote": str(output)}) if machine else f"wrote {output}")
