"""``penstock profile``: measure what the stages of a model cost, and write costs for the other commands."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.describe import example_from, layout_from
from penstock.cli.launch import launch
from penstock.cli.source import Json
from penstock.cli.user_code import load, user_code
from penstock.errors import RunError, WriteError
from penstock.simulation.costs import Costs

_REPEATS: Final = 20


def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="A model, or a function that builds one; also FILE.py:NAME.")
    ],
    example: Annotated[
        str,
        typer.Option(
            "--example", metavar="MODULE:NAME", help="(args, kwargs) of a call with one microbatch, or a function."
        ),
    ],
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Number of stages.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", metavar="STRING|FILE", help="A layout in Megatron's notation, or a YAML or JSON file."
        ),
    ] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Measure every layer, to plan the partition.")] = False,
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="MODULE:NAME", help="A function of the output and the target.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="MODULE:NAME", help="The target, or a function for it.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the costs, .toml or .json.")
    ] = Path("costs.toml"),
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="Number of processes.")] = 2,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often to measure each time.")] = _REPEATS,
    optimizer_state: Annotated[
        float, typer.Option("--optimizer-state", min=0, help="Tensors that the optimizer keeps for each parameter.")
    ] = 2.0,
    machine: Json = False,
    found: Annotated[Path | None, typer.Option("--found", hidden=True)] = None,
) -> None:
    """Measure F, B, I and W of every stage, its memory, and messages between processes; write them as costs.

    Each of the processes measures every stage, all at the same time, as in training; then messages go back and forth
    over torch.distributed. Times are in seconds, sizes in bytes, for one microbatch. The costs are medians; the table
    shows the quartiles, too. On several machines, call ps.profile in a script that torchrun starts.

    Example: penstock profile penstock.runtime.demo:build --stages 4 --example penstock.runtime.demo:example

    Example: penstock simulate ZBVZeroBubble --ranks 2 --costs costs.toml
    """
    if sum((stages is not None, layout is not None, per_layer)) != 1:
        raise RunError("pass one of --stages, --layout and --per-layer, e.g. --stages 4")
    if output.suffix.lower() not in (".toml", ".json"):
        raise WriteError(f"{output}: costs must be in a *.toml or *.json file")
    if find_spec("torch") is None:
        raise RunError("penstock profile needs torch: pip install 'penstock[torch]'")
    if found is None:
        facts = _launch(ranks)
        Costs.from_dict(facts["costs"]).write(output)
        typer.echo(json.dumps(facts, indent=2) if machine else f"{facts['table']}\n\nwrote {output}")
        return
    facts = _measure(
        model,
        example_from(example),
        {"stages": stages, "layout": None if layout is None else layout_from(layout)},
        per="layer" if per_layer else "stage",
        loss_fn=None if loss is None else load(loss),
        target=None if target is None else example_from(target),
        repeats=repeats,
        optimizer_state=optimizer_state,
    )
    if os.environ["RANK"] == "0":
        found.write_text(json.dumps(facts))


def _launch(ranks: int) -> dict[str, Any]:
    """Run this command again in several processes; returns what they have found."""
    lines: list[tuple[int, str]] = []

    def on_line(rank: int, _is_error: bool, line: str) -> None:
        lines.append((rank, line))
        if rank == 0:
            typer.echo(line, err=True)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-P", "-m", "penstock", *sys.argv[1:], "--found", str(path)]
        try:
            outcome = launch(command, ranks, on_line=on_line)
        except KeyboardInterrupt:
            typer.echo("penstock: interrupted; all processes have ended, and no costs were written", err=True)
            raise
        if outcome.code == 0:
            facts: dict[str, Any] = json.loads(path.read_text())
            return facts
    said = {line for rank, line in lines if rank == 0}
    for rank, line in lines:
        if line not in said:
            typer.echo(f"rank {rank}: {line}", err=True)
    if outcome.summary:
        typer.echo(f"penstock: {outcome.summary}", err=True)
    raise typer.Exit(outcome.code)


def _measure(name: str, example: Any, sizes: dict[str, Any], *, per: str, **options: Any) -> dict[str, Any]:
    """Measure on this rank."""
    distributed = import_module("torch.distributed")  # this layer does without torch
    measure = import_module("penstock.runtime.profiling").profile
    split = import_module("penstock.models.split").split
    built = load(name)

    def report(line: str) -> None:
        if os.environ["RANK"] == "0":
            typer.echo(line, err=True)

    distributed.init_process_group()
    try:
        with user_code(name):
            model = built if per == "layer" else split(built, **sizes, example=example)
        found = measure(model, example, per=per, report=report, **options)
    finally:
        distributed.destroy_process_group()
    return {**found.to_dict(), "table": found.describe()}
