"""``penstock check``: prove a schedule, or show what is wrong with it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.source import Json, Microbatches, Ranks, StagesPerRank, schedule_from
from penstock.errors import ModelError, VerificationError
from penstock.graph.models import LANES, MODELS, CommModel
from penstock.ir.schedule import Schedule
from penstock.lowering.pipeline import lower
from penstock.verification.check import DEFAULT_MODEL, check, safe_models
from penstock.verification.findings import Finding
from penstock.verification.window import picture

FOUND = 1


def check_command(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A schedule, or a .csv, .json or .txt file.")],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The communication model: buffering:lanes, with rendezvous, bounded(k) or eager, and rank, pair, "
            "direction or message.  [default: rendezvous:pair]"
        ),
    ] = None,
    memory_limit: Annotated[
        float | None, typer.Option(help="How many activations, of a stage and a microbatch, a rank has room for.")
    ] = None,
    lowered: Annotated[
        bool, typer.Option("--lower", help="Lower it first: add transfers, sharding and reductions.")
    ] = False,
    machine: Json = False,
) -> None:
    """Prove that a schedule runs, or show what is wrong.

    Complete, ordered, free of deadlock under a communication model, and within memory.

    Exit code 0 if nothing is wrong, 1 on a finding, 2 if the input cannot be read.

    Example: penstock check mine.csv --model rendezvous:pair --memory-limit 8
    """
    schedule = schedule_from(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    chosen = DEFAULT_MODEL if model is None else _parsed(model)
    if memory_limit is not None and memory_limit.is_integer():
        memory_limit = int(memory_limit)
    try:
        schedule = lower(schedule, model=chosen) if lowered else schedule
        findings = check(schedule, model=chosen, memory_limit=memory_limit)
    except VerificationError as error:
        findings = list(error.findings)  # of what came in: it could not be lowered
    if machine:
        typer.echo(json.dumps(_document(schedule, chosen, findings), indent=2))
    else:
        _report(Console(highlight=False), schedule, chosen, findings)
    if findings:
        raise typer.Exit(FOUND)


def _parsed(text: str) -> CommModel:
    buffering, colon, lanes = text.partition(":")
    if not colon:
        raise ModelError(f"{text!r} is not a communication model; write e.g. 'rendezvous:pair' or 'bounded(2):rank'")
    return CommModel(buffering, lanes)


def _report(console: Console, schedule: Schedule, model: CommModel, findings: list[Finding]) -> None:
    console.print(schedule.summary, soft_wrap=True, markup=False)
    if not findings:
        console.print(f"[green]right[/]: complete, ordered, and free of deadlock under {model}", soft_wrap=True)
    for finding in findings:
        console.print(Text("wrong: ", "red").append(str(finding), "default"), soft_wrap=True)
    if findings:
        console.print("\n" + picture(schedule, findings), soft_wrap=True, markup=False)
    if schedule.lowered and not _is_broken(findings):
        console.print()
        console.print(_table(schedule))


def _is_broken(findings: list[Finding]) -> bool:
    """Whether more is wrong than a deadlock: then what waits for what is not known."""
    return any(finding.kind not in ("deadlock", "memory") for finding in findings)


def _table(schedule: Schedule) -> Table:
    """Under which models it is free of deadlock."""
    safe = {str(model): free for model, free in safe_models(schedule).items()}
    table = Table(title="free of deadlock?", title_justify="left", box=None, pad_edge=False)
    table.add_column("one lane per")
    bufferings = list(dict.fromkeys(model.buffering for model in MODELS))
    for buffering in bufferings:
        table.add_column(buffering)
    for lanes in LANES:
        answers = [safe[str(CommModel(buffering, lanes))] for buffering in bufferings]
        table.add_row(lanes, *("[green]yes[/]" if answer else "[red]no[/]" for answer in answers))
    return table


def _document(schedule: Schedule, model: CommModel, findings: list[Finding]) -> dict[str, Any]:
    known = schedule.lowered and not _is_broken(findings)
    return {
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "model": {"buffering": model.buffering, "lanes": model.lanes},
        "findings": [
            {
                "kind": finding.kind,
                "rank": finding.rank,
                "step": finding.step,
                "action": None if finding.action is None else str(finding.action),
                "message": finding.message,
                "fix": finding.fix,
                "marks": [list(mark) for mark in finding.marks],
            }
            for finding in findings
        ],
        "safe": [
            {"buffering": one.buffering, "lanes": one.lanes, "free_of_deadlock": free}
            for one, free in (safe_models(schedule).items() if known else ())
        ],
    }
