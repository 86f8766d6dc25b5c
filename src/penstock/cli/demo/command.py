"""``penstock demo``: from an ordinary model to a planned, proved, trained and reported pipeline."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.demo.choose import Chosen, choose_plan, choose_schedule
from penstock.cli.demo.listener import Listener
from penstock.cli.demo.results import compare, report
from penstock.cli.drawing import GridDrawing
from penstock.cli.launch import GRACE, launch
from penstock.cli.plan import reporting_progress
from penstock.cli.show import echo
from penstock.cli.source import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    Json,
    Microbatches,
    Ranks,
    StagesPerRank,
    schedule_from,
)
from penstock.cli.terminal import terminal
from penstock.errors import RunError, ScheduleError
from penstock.ir.actions import FORWARD
from penstock.ir.schedule import Schedule
from penstock.lowering.pipeline import lower
from penstock.simulation.costs import Costs
from penstock.verification.check import check, safe_models

#: The module that every rank runs; only named here, because its layer imports torch.
MODULE: Final = "penstock.runtime.demo"
#: Samples per microbatch.
SAMPLES: Final = 4
#: How many blocks the model has, or one per stage if that is more.
BLOCKS: Final = 8


def demo(
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="NAME|FILE", help="A schedule, instead of planning one for the costs."),
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Number of training steps.")] = 120,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="For the report, the plan and the checkpoint.")
    ] = Path("penstock-demo"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in this folder.")] = False,
    machine: Json = False,
) -> None:
    """Train a small GPT on local processes, with a schedule that is planned for them; report what happened.

    It learns to write Python from the source of the standard library, byte by byte. Its layers are profiled, cut into
    stages by cost, and scheduled; the schedule is verified before it runs, and the gradients of the first step are
    compared with those of the unsplit model. Ctrl-C saves a checkpoint; --resume goes on from it, also with another
    number of ranks or another schedule. The report is one HTML file.

    Example: penstock demo --ranks 2 --schedule 1F1B

    Example: penstock demo --resume --ranks 2 --steps 200
    """
    given = None
    if schedule is not None:
        given = schedule_from(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        _check_trainable(schedule, given)
    _check_torch()
    saved, description = output / "checkpoint", output / "training.json"
    _check_folder(saved, description, resume=resume)
    console = Console(quiet=True) if machine else terminal()
    blocks = max(BLOCKS, 0 if given is None else given.stages)
    if resume:
        blocks = json.loads(description.read_text())["blocks"]  # the model is that of the checkpoint
    job = {"samples": SAMPLES, "blocks": blocks, "steps": steps, "folder": str(saved)}
    output.mkdir(parents=True, exist_ok=True)
    listener = Listener(console, steps)
    begun = time.monotonic()
    count = given.ranks if given is not None else DEFAULT_RANKS if ranks is None else ranks
    with listener.waiting(f"profiling the {blocks + 2} layers on {count} ranks"):
        _run(output / "profile.json", {**job, "task": "profile"}, count, listener)
    if (profiled := listener.profiled) is None:
        raise typer.Exit(1)
    costs, names = Costs.from_dict(profiled["costs"]), tuple(profiled["names"])
    if given is None:
        with reporting_progress(machine=machine) as progress:
            chosen = choose_plan(
                costs,
                names,
                ranks=count,
                microbatches=DEFAULT_MICROBATCHES if microbatches is None else microbatches,
                stages_per_rank=stages_per_rank,
                progress=progress,
            )
    else:
        chosen = choose_schedule(given, costs, names)
    facts = _proved(console, chosen)
    chosen.write(output)
    if not resume:
        shutil.rmtree(saved, ignore_errors=True)
    with listener.progress_bar():
        job |= {"task": "train", "schedule": str(output / "schedule.json"), "layout": chosen.layout}
        code = _run(description, job, count, listener)
    facts |= listener.facts | {"seconds": time.monotonic() - begun}
    if listener.recorded is not None:
        facts |= compare(console, chosen, listener.recorded)
        path = output / "report.html"
        report(path, chosen, listener, facts)
        facts["report"] = str(path)
        console.print(Text(f"\nreport: {path}"), soft_wrap=True)
    if machine:
        typer.echo(json.dumps(facts, indent=2))
    if code != 0 or not listener.is_complete:
        raise typer.Exit(code or 1)


def _check_trainable(name: str, schedule: Schedule) -> None:
    types = {part.computation_type for row in schedule.actions for cell in row if cell for part in cell.parts}
    if types <= {FORWARD}:
        raise ScheduleError(f"{name} has no backward, so nothing would be trained; try --schedule 1F1B")


def _check_folder(saved: Path, description: Path, *, resume: bool) -> None:
    """Refuse to resume from nothing, and to replace a folder that the demo has not written."""
    if resume and not (saved.is_dir() and description.is_file()):
        raise RunError(
            f"there is no checkpoint in {saved.parent}; omit --resume to begin, or name its folder with --output"
        )
    if saved.exists() and not description.is_file():
        raise RunError(f"{saved} is not a checkpoint of the demo, which would replace it; choose another --output")


def _check_torch() -> None:
    if find_spec("torch") is None:
        raise RunError("the demo needs torch, which is not installed: pip install 'penstock[torch]'")


def _run(path: Path, job: dict[str, Any], ranks: int, listener: Listener) -> int:
    """Run a job on all ranks; returns the exit code. After Ctrl-C they save a checkpoint, and then all end."""
    path.write_text(json.dumps(job))
    command = [sys.executable, "-P", "-m", MODULE, str(path)]
    try:
        outcome = launch(command, ranks, on_line=listener.on_line, interrupt=signal.SIGTERM, grace=GRACE)
    finally:
        listener.end_line()
        if listener.stopped_at is not None:
            step = listener.stopped_at
            typer.echo(f"penstock: stopped after step {step}; add --resume to go on from there", err=True)
    if outcome.summary and listener.gradients_are_right is not False:
        typer.echo(f"penstock: {outcome.summary}", err=True)
    return outcome.code


def _proved(console: Console, chosen: Chosen) -> dict[str, Any]:
    """Draw the schedule, and verify it."""
    schedule = chosen.schedule
    echo(console, GridDrawing(schedule, aligned=None, width=console.width))
    lowered = lower(schedule) if schedule.compute_only else schedule
    findings = [str(finding) for finding in check(lowered)]
    models = safe_models(lowered)
    actions = sum(map(len, lowered.actions))
    summary = "complete, ordered, free of deadlock" if not findings else "; ".join(findings)
    lines = [
        f"lowered to {actions} actions: {summary} (under {sum(models.values())} of {len(models)} communication models)",
        *chosen.explanation,
        "",
    ]
    console.print(Text("\n".join(lines)), soft_wrap=True)
    return {
        "schedule": chosen.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "layers": [len(names) for names in chosen.layout],
        "actions_when_lowered": actions,
        "findings": findings,
    }
