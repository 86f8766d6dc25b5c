"""``penstock convert``: write a schedule in another format, optionally lowered or repaired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.lowering import DeferReceives, LookAhead, Lower, Lowering, MergeBackward, NoUnshard
from penstock.cli.source import Json, Microbatches, Ranks, Source, StagesPerRank, parse_model, schedule_from
from penstock.errors import WriteError
from penstock.ir.formats import write
from penstock.lowering.repair import repair as repaired


def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The file to write; its suffix selects the format.")],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    lower: Lower = False,
    defer_receives: DeferReceives = False,
    look_ahead: LookAhead = None,
    merge_backward: MergeBackward = False,
    no_unshard: NoUnshard = False,
    repair: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Reorder transfers so that it is free of deadlock under this communication model, e.g. "
            "rendezvous:pair; see penstock check.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the target if it exists.")] = False,
    machine: Json = False,
) -> None:
    """Write a schedule to a CSV, JSON or text file.

    Example: penstock convert 1F1B lowered.csv --ranks 2 --lower

    Example: penstock convert mine.csv mine.json

    Example: penstock convert stuck.csv fixed.csv --repair rendezvous:pair
    """
    schedule = schedule_from(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    schedule = Lowering(lower, defer_receives, look_ahead, merge_backward, no_unshard).of(schedule)
    if repair is not None:
        schedule = repaired(schedule, parse_model(repair))
    try:
        write(schedule, target, overwrite=force)
    except WriteError as fact:
        hint = "; --force replaces it" if str(fact).endswith("already exists") else ""
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
