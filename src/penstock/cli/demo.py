"""``penstock demo``: schedules built, drawn, lowered, proved, simulated and written, in a second."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from penstock.cli.painting import Picture
from penstock.cli.show import echo
from penstock.cli.source import Json
from penstock.cli.terminal import fitted, terminal
from penstock.ir.formats import FORMATS, read
from penstock.lowering.pipeline import lower
from penstock.schedules.registry import build
from penstock.simulation.simulate import simulate
from penstock.verification.check import check, safe_models

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule

RANKS = 4
MICROBATCHES = 6
SHOWN = ("1F1B", "ZB-H1", "ZBVZeroBubble")


class Facts(NamedTuple):
    """What was seen of a schedule, not claimed."""

    schedule: str
    actions_when_lowered: int
    findings: list[str]
    safe_under: int
    models: int
    read_back_equal: bool
    makespan: float
    bubble_rate: float
    peak_memory: float

    @property
    def good(self) -> bool:
        """Whether all of it is as it should be."""
        return not self.findings and self.safe_under == self.models and self.read_back_equal


def demo(machine: Json = False) -> None:
    """Show three schedules, prove that they run, and predict what they take.

    Example: penstock demo
    """
    console = terminal()
    seen = []
    for name in SHOWN:
        schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES)
        seen.append(_facts(name, schedule))
        if not machine:
            echo(console, Picture(schedule, aligned=None, width=fitted(console)))
            console.print(_told(seen[-1]), "\n", sep="", soft_wrap=True)
    if machine:
        typer.echo(json.dumps([facts._asdict() for facts in seen], indent=2))
    else:
        console.print(
            "Next: penstock compare, penstock view 1F1B ZBVZeroBubble, or in Python: import penstock as ps",
            soft_wrap=True,
        )
    if not all(facts.good for facts in seen):
        raise typer.Exit(1)


def _facts(name: str, schedule: Schedule) -> Facts:
    lowered = lower(schedule)
    models = safe_models(lowered)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"schedule{suffix}") for suffix in FORMATS]
        for path in paths:
            lowered.write(path)
        same = all(read(path) == lowered for path in paths)
    findings = [str(finding) for finding in check(lowered)]
    timeline = simulate(lowered)
    return Facts(
        name,
        sum(map(len, lowered.actions)),
        findings,
        sum(models.values()),
        len(models),
        same,
        timeline.makespan,
        timeline.bubble_rate,
        max(timeline.peak_memory),
    )


def _told(facts: Facts) -> str:
    """In a line."""
    runs = "complete, ordered, free of deadlock" if not facts.findings else "; ".join(facts.findings)
    files = "reads back equal from every format" if facts.read_back_equal else "does not read back equal"
    return (
        f"lowered to {facts.actions_when_lowered} actions: {runs}; "
        f"safe under {facts.safe_under} of {facts.models} communication models; {files}; "
        f"simulated with F, I and W of 1: makespan {facts.makespan:g}, {facts.bubble_rate:.1%} of it bubble, "
        f"{facts.peak_memory:g} activations held at most"
    )
