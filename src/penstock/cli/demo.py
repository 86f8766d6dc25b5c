"""``penstock demo``: train a small GPT on local processes with the schedule of your choice."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.drawing import GridDrawing
from penstock.cli.launch import cores, launch
from penstock.cli.show import echo
from penstock.cli.source import Json, Microbatches, Ranks, StagesPerRank, schedule_from
from penstock.cli.terminal import terminal
from penstock.errors import RunError, ScheduleError
from penstock.ir.actions import BACKWARD_INPUT, FORWARD, FULL_BACKWARD, ComputationType
from penstock.ir.schedule import Schedule
from penstock.lowering.pipeline import lower
from penstock.simulation.costs import Costs
from penstock.simulation.simulate import simulate
from penstock.simulation.timeline import Timeline
from penstock.verification.check import check, safe_models

#: The module that every rank runs; only named here, because its layer imports torch.
TRAINING: Final = "penstock.runtime.demo"
#: The number of lines that report losses if there is no terminal for a progress bar.
REPORTS: Final = 10


def demo(
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME|FILE", help="A schedule, or a .csv, .json or .txt file.")
    ] = "ZBVZeroBubble",
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Number of training steps.")] = 120,
    machine: Json = False,
) -> None:
    """Train a small GPT on local processes, and compare the predicted times with the measured ones.

    It learns to write Python from the source of the standard library, byte by byte. The schedule is verified before any
    process starts, and the gradients of the first step are compared with those of the unsplit model.

    Example: penstock demo --ranks 2 --schedule 1F1B
    """
    chosen = schedule_from(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    _check_trainable(schedule, chosen)
    console = Console(quiet=True) if machine else terminal()
    facts = _proved(console, chosen)
    listener = _Listener(console, steps)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, listener.progress_bar():
        path = Path(folder, "schedule.json")
        chosen.write(path)
        command = [sys.executable, "-P", "-m", TRAINING, str(path), str(steps)]
        outcome = launch(command, chosen.ranks, on_line=listener.on_line, interrupt=signal.SIGTERM)
    if outcome.summary and listener.gradients_are_right is not False:
        typer.echo(f"penstock: {outcome.summary}", err=True)
    facts |= listener.facts | {"seconds": time.monotonic() - begun}
    if listener.recorded is not None:
        timeline = simulate(chosen, Costs.from_dict(listener.recorded["costs"]))
        facts |= {"predicted": _predicted(timeline), "measured": _measured(listener.recorded)}
        _compare(console, timeline, listener.recorded)
    if machine:
        typer.echo(json.dumps(facts, indent=2))
    if outcome.code != 0 or listener.recorded is None:
        raise typer.Exit(1)


def _check_trainable(name: str, schedule: Schedule) -> None:
    if _types(schedule) <= {FORWARD}:
        raise ScheduleError(f"{name} has no backward, so nothing would be trained; try --schedule 1F1B")
    if find_spec("torch") is None:
        raise RunError("the demo needs torch, which is not installed: pip install 'penstock[torch]'")


def _types(schedule: Schedule) -> set[ComputationType]:
    return {part.computation_type for row in schedule.actions for cell in row if cell for part in cell.parts}


def _assumed(schedule: Schedule) -> str:
    """Describe the default costs, in the letters of this schedule."""
    types = _types(schedule)
    if BACKWARD_INPUT not in types:
        return "if B took twice as long as F"
    return f"if F, I and W took the same{', and B as long as two' if FULL_BACKWARD in types else ''}"


def _proved(console: Console, schedule: Schedule) -> dict[str, Any]:
    """Draw the schedule, and verify it."""
    echo(console, GridDrawing(schedule, aligned=None, width=console.width))
    lowered = lower(schedule) if schedule.compute_only else schedule
    findings = [str(finding) for finding in check(lowered)]
    models, timeline = safe_models(lowered), simulate(schedule)
    actions = sum(map(len, lowered.actions))
    summary = "complete, ordered, free of deadlock" if not findings else "; ".join(findings)
    safe = f"{sum(models.values())} of {len(models)} communication models"
    console.print(
        Text(
            f"lowered to {actions} actions: {summary} (under {safe})\n"
            f"{_assumed(schedule)}: {timeline.bubble_rate:.1%} bubble, "
            f"at most {max(timeline.peak_memory):g} activations held\n"
        ),
        soft_wrap=True,
    )
    return {
        "schedule": schedule.metadata.get("name"),
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "actions_when_lowered": actions,
        "findings": findings,
    }


class _Listener:
    """Reads what the ranks write, and shows it."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._tokens = 0
        self._seconds = 0.0
        self._losses: list[float] = []
        self._gradients: dict[str, Any] | None = None
        self._bar: Progress | None = None
        self.recorded: dict[str, Any] | None = None

    @property
    def gradients_are_right(self) -> bool | None:
        """Whether the gradients match; None if they have not been compared."""
        return None if self._gradients is None else self._gradients["right"]

    @property
    def facts(self) -> dict[str, Any]:
        """Return the results as JSON-compatible data."""
        rate = self._tokens * (len(self._losses) - 1) / self._seconds if self._seconds else None
        return {"losses": self._losses, "gradients": self._gradients, "tokens_per_second": rate}

    @contextmanager
    def progress_bar(self) -> Iterator[None]:
        """Show a progress bar if the output is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
        )
        # Redrawn on events: a refresh thread would be forked into the ranks.
        with Progress(*columns, console=self._console, auto_refresh=False, expand=True) as self._bar:
            self._bar.add_task("", total=self._steps, summary="starting")
            self._bar.refresh()
            yield

    def on_line(self, rank: int, is_error: bool, line: str) -> None:
        """Handle a line of a rank: an event, or other output."""
        event = None if is_error or not line.startswith("{") else json.loads(line)
        if event is None:
            Console(stderr=True, highlight=False).print(Text(f"rank {rank}: {line}"), soft_wrap=True)
            return
        {"start": self._start, "gradients": self._compared, "step": self._step, "recorded": self._finished}[
            event.pop("event")
        ](event)

    def _start(self, facts: dict[str, Any]) -> None:
        self._tokens = facts["tokens"]
        self._print(f"a GPT of {facts['parameters']:,} parameters, {facts['tokens']:,} bytes of Python in a step")

    def _compared(self, facts: dict[str, Any]) -> None:
        self._gradients = facts
        verdict = "match the unsplit model" if facts["right"] else "do not match the unsplit model"
        self._print(
            f"gradients of the first step {verdict}: largest difference {facts['difference']:.1e}, "
            f"largest gradient {facts['largest']:.1e}"
        )

    def _step(self, facts: dict[str, Any]) -> None:
        self._losses.append(facts["loss"])
        if len(self._losses) > 1:  # the first step includes negotiating shapes
            self._seconds += facts["seconds"]
        number, last = facts["step"], facts["step"] == self._steps
        if self._bar is not None:
            summary = f"loss {facts['loss']:.3f}  {self._tokens / facts['seconds']:,.0f} tokens/s"
            self._bar.update(self._bar.task_ids[0], completed=number, summary=summary)
            self._bar.refresh()
        elif number == 1 or last or number % max(1, self._steps // REPORTS) == 0:
            self._print(f"step {number} loss {facts['loss']:.3f}")

    def _finished(self, facts: dict[str, Any]) -> None:
        self.recorded = facts

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def _predicted(timeline: Timeline) -> dict[str, Any]:
    return _figures(timeline.makespan, timeline.busy, timeline.idle, timeline.extent.end.tolist())


def _measured(recorded: dict[str, Any]) -> dict[str, Any]:
    return _figures(recorded["makespan"], recorded["busy"], recorded["idle"], recorded["ends"])


def _figures(makespan: float, busy: Any, idle: Any, ends: Any) -> dict[str, Any]:
    rows = zip(busy, idle, ends, strict=True)
    return {"makespan": makespan, "ranks": [dict(zip(("busy", "idle", "ends"), row, strict=True)) for row in rows]}


def _compare(console: Console, timeline: Timeline, recorded: dict[str, Any]) -> None:
    """Print the predicted next to the measured times of every rank."""
    predicted, measured = _predicted(timeline), _measured(recorded)
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    for title in ("busy", "idle", "ends"):
        for kind in ("predicted", "measured"):
            table.add_column(f"{title}\n{kind}", justify="right")
    for rank, (said, seen) in enumerate(zip(predicted["ranks"], measured["ranks"], strict=True)):
        figures = [_milliseconds(facts[title]) for title in ("busy", "idle", "ends") for facts in (said, seen)]
        table.add_row(str(rank), *figures)
    console.print(Text("\n".join(["", *_explained(recorded["steps"], timeline.schedule.ranks)])), soft_wrap=True)
    console.print(table)
    said, seen = predicted["makespan"], measured["makespan"]
    console.print(
        Text(f"a step: predicted {_milliseconds(said)}, measured {_milliseconds(seen)} ({_apart(said, seen)})"),
        soft_wrap=True,
    )


def _explained(steps: int, ranks: int) -> list[str]:
    """Explain the figures."""
    if steps == 1:
        lines = ["measured in the last step; predicted from the time of each action in it, without waiting"]
    else:
        lines = [
            f"measured in the step of median length among the last {steps}; "
            "predicted from the time of each action in all of them, without waiting"
        ]
    if ranks > (available := cores()):
        shared = "1 core" if available == 1 else f"{available} cores"
        lines.append(
            f"{ranks} ranks share {shared} here, and wait for them; the prediction gives each rank its own core, "
            "so it is too short"
        )
    return lines


def _apart(predicted: float, measured: float) -> str:
    """Return the difference in percent.

    >>> _apart(99.9, 100), _apart(90, 100), _apart(110, 100)
    ('0%', '-10%', '+10%')
    """
    percent = round(100 * (predicted / measured - 1))
    return f"{percent:+d}%" if percent else "0%"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
