"""``penstock convert``: write a schedule in another format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.source import Json, Microbatches, Ranks, StagesPerRank, schedule_from
from penstock.errors import WriteError
from penstock.ir.formats import write


def convert(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A schedule, or a .csv, .json or .txt file.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The file to write; its suffix says how.")],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the target if it is there.")] = False,
    machine: Json = False,
) -> None:
    """Write a schedule to a CSV, JSON or text file.

    Example: penstock convert mine.csv mine.json
    """
    schedule = schedule_from(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    try:
        write(schedule, target, overwrite=force)
    except WriteError as fact:
        hint = "; --force replaces it" if str(fact).endswith("is there already") else ""
        raise WriteError(f"{fact}{hint}") from None
    if machine:
        facts = {
            "target": str(target),
            "ranks": schedule.ranks,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
        }
        typer.echo(json.dumps(facts))
    else:
        typer.echo(f"{target}: {schedule.summary}")
