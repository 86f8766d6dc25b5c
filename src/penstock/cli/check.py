"""``penstock check``: verify a schedule, or show what is wrong with it."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.lowering import DeferReceives, LookAhead, Lower, Lowering, MergeBackward, NoUnshard
from penstock.cli.main import FOUND
from penstock.cli.source import Json, Microbatches, Ranks, Source, StagesPerRank, parse_model, schedule_from
from penstock.cli.terminal import Width, layout_width, terminal
from penstock.errors import VerificationError
from penstock.graph.action_table import ActionTable, is_too_sparse
from penstock.graph.comm_model import LANES, MODELS, CommModel
from penstock.ir.schedule import Schedule
from penstock.verification.check import DEFAULT_MODEL, check, safe_models
from penstock.verification.findings import Finding
from penstock.verification.memory import peaks
from penstock.verification.window import draw_findings


def check_command(
    source: Source,
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
        float | None,
        typer.Option(min=0, help="How many activations, each of one stage and microbatch, a rank can hold."),
    ] = None,
    lower: Lower = False,
    defer_receives: DeferReceives = False,
    look_ahead: LookAhead = None,
    merge_backward: MergeBackward = False,
    no_unshard: NoUnshard = False,
    width: Width = None,
    machine: Json = False,
) -> None:
    """Verify that a schedule runs, or show what is wrong.

    Checks that it is complete, ordered, free of deadlock under a communication model, and within the memory limit.

    The exit code is 0 if nothing is wrong, 1 on a finding, 2 if the input cannot be read.

    Example: penstock check 1F1B --lower --defer-receives --model eager:pair

    Example: penstock check mine.csv --model rendezvous:pair --memory-limit 8
    """
    schedule = schedule_from(source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    chosen = DEFAULT_MODEL if model is None else parse_model(model)
    limit = _limit(memory_limit)
    try:
        schedule = Lowering(lower, defer_receives, look_ahead, merge_backward, no_unshard).of(schedule)
        findings = check(schedule, model=chosen, memory_limit=limit)
    except VerificationError as error:
        findings = list(error.findings)  # of the input, which could not be lowered
    checked = Checked(schedule, chosen, limit, findings)
    if machine:
        typer.echo(json.dumps(_document(checked), indent=2))
    else:
        console = terminal(width)
        _report(console, checked, layout_width(console, width))
    if findings:
        raise typer.Exit(FOUND)


class Checked(NamedTuple):
    """A checked schedule, with the conditions and the findings."""

    schedule: Schedule
    model: CommModel
    memory_limit: float | None
    findings: list[Finding]

    @property
    def peaks(self) -> list[int] | None:
        """The most activations that each rank holds; None if not requested or unknown."""
        if self.memory_limit is None or is_too_sparse(self.schedule):
            return None
        return peaks(ActionTable(self.schedule))

    @property
    def models(self) -> dict[CommModel, bool] | None:
        """Whether it is free of deadlock under each model; None if it has no transfers, or has other findings."""
        broken = any(finding.kind not in ("deadlock", "memory") for finding in self.findings)
        return safe_models(self.schedule) if self.schedule.lowered and not broken else None


def _limit(asked: float | None) -> float | None:
    """Return the requested limit, as an integer if it is one."""
    if asked is not None and not math.isfinite(asked):
        raise typer.BadParameter(f"{asked} is not a number of activations; write e.g. 8", param_hint="--memory-limit")
    return int(asked) if asked is not None and asked.is_integer() else asked


def _report(console: Console, checked: Checked, width: int | None) -> None:
    whole = width is None  # do not wrap lines in a pipe
    console.print(checked.schedule.summary, soft_wrap=whole, markup=False)
    if not checked.findings:
        console.print(f"[green]ok[/]: complete, ordered, and free of deadlock under {checked.model}", soft_wrap=whole)
    for finding in checked.findings:
        console.print(Text("error: ", "red").append(str(finding), "default"), soft_wrap=whole)
    if held := checked.peaks:
        console.print(_describe_memory(held, checked.memory_limit), soft_wrap=whole)
    if checked.findings:
        console.print("\n" + draw_findings(checked.schedule, checked.findings, width), soft_wrap=True, markup=False)
    if models := checked.models:
        console.print()
        console.print(_table(models))


def _describe_memory(held: list[int], limit: float | None) -> str:
    most = max(held)
    noun = "activation" if most == 1 else "activations"
    return f"memory: at most {most} {noun} on a rank (rank {held.index(most)}); the limit is {limit}"


def _table(models: dict[CommModel, bool]) -> Table:
    """Return a table of the models under which it is free of deadlock."""
    table = Table(title="free of deadlock?", title_justify="left", box=None, pad_edge=False)
    table.add_column("one lane per")
    bufferings = list(dict.fromkeys(model.buffering for model in MODELS))
    for buffering in bufferings:
        table.add_column(buffering)
    for lanes in LANES:
        answers = [models[CommModel(buffering, lanes)] for buffering in bufferings]
        table.add_row(lanes, *("[green]yes[/]" if answer else "[red]no[/]" for answer in answers))
    return table


def _document(checked: Checked) -> dict[str, Any]:
    schedule, model, models = checked.schedule, checked.model, checked.models
    return {
        "ok": not checked.findings,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "model": {"buffering": model.buffering, "lanes": model.lanes},
        "memory": None if checked.memory_limit is None else {"limit": checked.memory_limit, "peak": checked.peaks},
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
            for finding in checked.findings
        ],
        "models": None
        if models is None
        else [
            {"buffering": one.buffering, "lanes": one.lanes, "free_of_deadlock": free} for one, free in models.items()
        ],
    }
