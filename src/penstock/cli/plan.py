"""``penstock plan``: choose the best schedule for given costs under a memory limit, with a proven gap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.costs import CostsFile, costs_from, format_number, naming_costs_file
from penstock.cli.frameworks import Frameworks, check_frameworks, settings_facts, show_settings, write_settings
from penstock.cli.source import DEFAULT_MICROBATCHES, DEFAULT_RANKS, Json, Microbatches, Ranks, StagesPerRank
from penstock.cli.terminal import Width, terminal
from penstock.errors import PlanError
from penstock.simulation.timeline_json import write_timeline

UNITS: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_AMOUNT: Final = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)

#: How many alternatives the table shows, unless all are asked for.
SHOWN: Final = 12


def plan(
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    costs: CostsFile = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="AMOUNT", help="Memory of a rank in the unit of the costs, or 24GiB."),
    ] = None,
    stages_per_rank: StagesPerRank = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Costs are those of layers; cut them into stages, too.")
    ] = False,
    objective: Annotated[
        str, typer.Option("--objective", help="What to minimise: makespan, span or period.")
    ] = "makespan",
    effort: Annotated[float, typer.Option("--effort", help="How much to search; 60 takes about a minute.")] = 1.0,
    exact: Annotated[
        float | None,
        typer.Option("--exact", metavar="SECONDS", help="Time for the exact solver, from the extra penstock[exact]."),
    ] = None,
    no_split: Annotated[bool, typer.Option("--no-split", help="Do not split backwards into I and W.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Stages may recompute their forward to save memory.")
    ] = False,
    noise: Annotated[
        float, typer.Option("--noise", help="Relative standard deviation of action times, e.g. 0.1.")
    ] = 0.0,
    stragglers: Annotated[
        float, typer.Option("--stragglers", help="Relative standard deviation of rank speeds.")
    ] = 0.0,
    percentile: Annotated[
        float | None, typer.Option("--percentile", help="Of the random times, instead of their mean.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="VARIABLE", help="Vary memory, microbatches or ranks.")
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write: the schedule (.csv, .txt), the timeline (.html), a chart (.png, .svg); "
            "by default plan.csv and plan.html.",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="FILE", help="Also keep the timeline (.json), for penstock compare and view."
        ),
    ] = None,
    frameworks: Frameworks = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all alternatives.")] = False,
    width: Width = None,
    machine: Json = False,
) -> None:
    """Choose the best schedule for these costs under a memory limit, and prove how close to optimal it is.

    Costs are those of whole ranks, as in penstock compare: one number for all, or a list with one per rank. With
    --layers they are those of layers, which are cut into stages. Ctrl-C ends the search and keeps the best so far. The
    exit code is 1 if nothing fits the memory limit.

    Example: penstock plan --ranks 8 --microbatches 24 --memory-limit 8

    Example: penstock plan --ranks 8 --microbatches 24 --costs costs.toml --memory-limit 24GiB

    Example: penstock plan --ranks 8 --microbatches 24 --sweep memory -o front.png

    Example: penstock plan --ranks 8 --microbatches 24 --for torchtitan --for megatron
    """
    from penstock.planning.plan import plan as make_plan

    check_frameworks(frameworks or [], sweep=sweep)
    arguments: dict[str, Any] = {
        "costs": costs_from(costs),
        "ranks": DEFAULT_RANKS if ranks is None else ranks,
        "microbatches": DEFAULT_MICROBATCHES if microbatches is None else microbatches,
        "memory_limit": None if memory_limit is None else parse_amount(memory_limit),
        "stages_per_rank": stages_per_rank,
        "layers": layers or None,
        "objective": objective,
        "effort": effort,
        "exact": exact,
        "split": not no_split,
        "recompute": recompute,
        "noise": noise,
        "stragglers": stragglers,
        "percentile": percentile,
        "seed": seed,
    }
    console = terminal(width)
    try:
        with naming_costs_file(costs):
            if sweep is not None:
                _sweep(console, sweep, arguments, output or [], machine=machine)
                return
            with reporting_progress(machine=machine) as report:
                found = make_plan(**arguments, progress=report)
    except PlanError as error:
        if error.field == "memory_limit":
            typer.echo(f"penstock: {error}", err=True)
            raise typer.Exit(1) from None
        raise
    written = [Path("plan.csv"), Path("plan.html")] if output is None else output
    for path in written:
        (found.schedule if path.suffix.lower() in (".csv", ".txt") else found.timeline).write(path)
    if keep is not None:
        write_timeline(found.timeline, keep)
    settings = write_settings(found, frameworks or [], written[0].parent if written else Path())
    if machine:
        facts = found.to_dict()
        if settings:
            facts["settings"] = settings_facts(settings)
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = found.alternatives if everything else found.alternatives[:SHOWN]
    console.print(_table([_cells(each) for each in rows], _TITLES))
    if len(rows) < len(found.alternatives):
        console.print(Text(f"and {len(found.alternatives) - len(rows)} more: --all shows them", style="dim"))
    console.print()
    console.print(Text("\n".join(found.summary())), soft_wrap=True)
    for path in written:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    show_settings(console, settings)


def parse_amount(text: str) -> float:
    """Return an amount of memory: a number, or one with a unit of bytes.

    >>> parse_amount("24GiB"), parse_amount("8"), parse_amount("1.5k")
    (25769803776.0, 8.0, 1500.0)
    """
    found = _AMOUNT.fullmatch(text.strip())
    try:
        if found:
            return float(found[1]) * UNITS[(found[2] or "").lower()]
    except ValueError:
        pass
    raise PlanError(
        f"--memory-limit {text!r} is not an amount; write a number such as 8, or 24GiB",
        field="memory_limit",
        value=text,
    )


@contextmanager
def reporting_progress(*, machine: bool) -> Iterator[Callable[[Any], None] | None]:
    """Show a line of progress in the terminal, and yield the function that updates it; None for a pipe."""
    console = Console(stderr=True)
    if machine or not console.is_terminal:
        yield None
        return
    with console.status("planning") as status:

        def update(progress: Any) -> None:
            best = format_number(progress.best) if progress.best < float("inf") else "none yet"
            words = f"{progress.doing}: best {best}, bound {format_number(progress.bound)}"
            if progress.bound > 0 and progress.gap < float("inf"):
                words += f", gap {progress.gap:.2%}"
            status.update(f"{words}, {progress.seconds:.0f} s")

        yield update


_TITLES: Final = ("", "schedule", "where", "time", "bubble", "memory", "why not")


def _cells(alternative: Any) -> tuple[list[str], str]:
    timeline, chosen = alternative.timeline, not alternative.reason
    cells = [
        "*" if chosen else "",
        alternative.name,
        alternative.placement,
        format_number(alternative.value),
        f"{timeline.bubble_rate:.1%}",
        format_number(max(timeline.peak_memory)),
        alternative.reason,
    ]
    return cells, "bold" if chosen else "" if alternative.fits else "dim"


def _table(rows: list[tuple[list[str], str]], titles: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        words = title in ("", "schedule", "where", "why not")
        table.add_column(title, justify="left" if words else "right", no_wrap=title not in ("schedule", "why not"))
    for cells, style in rows:
        table.add_row(*cells, style=style)
    return table


def _sweep(console: Console, variable: str, arguments: dict[str, Any], output: list[Path], *, machine: bool) -> None:
    """Print a plan for each value, and draw the front."""
    from penstock.planning.sweep import Point, sweep
    from penstock.view.front import Dot, write_front

    points: list[Point] = []
    with reporting_progress(machine=machine) as report:
        points += sweep(variable, **arguments, progress=report)
    for path in output:
        dots = [Dot(point.value, point.time_per_microbatch, point.plan.alternatives[0].name) for point in points]
        write_front(path, variable, dots)
    if machine:
        facts = [
            {variable: point.value, "is_better": point.is_better, "plan": point.plan.to_dict()} for point in points
        ]
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = []
    for point in points:
        chosen = point.plan.alternatives[0]
        cells = [
            "*" if point.is_better else "",
            format_number(point.value),
            format_number(point.plan.value),
            format_number(point.time_per_microbatch),
            format_number(point.peak_memory),
            f"{point.plan.gap:.2%}",
            f"{chosen.name}, {chosen.placement}",
        ]
        rows.append((cells, "" if point.is_better else "dim"))
    console.print(_table(rows, ("", variable, "time", "per microbatch", "peak memory", "gap", "schedule")))
    for path in output:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
