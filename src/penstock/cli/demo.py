"""``penstock demo``: a schedule built, drawn, walked through and written, in a second."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from penstock.cli.painting import Picture
from penstock.cli.show import echo
from penstock.cli.source import Json
from penstock.ir.actions import FORWARD
from penstock.ir.alignment import unit_steps
from penstock.ir.formats import FORMATS, read
from penstock.schedules.registry import build

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule

RANKS = 4
MICROBATCHES = 6
SHOWN = ("1F1B", "ZB-H1", "ZBVZeroBubble")


def demo(machine: Json = False) -> None:
    """Show three schedules, and check that they run and survive being written.

    Example: penstock demo
    """
    console = Console(highlight=False)
    facts = []
    for name in SHOWN:
        schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES)
        facts.append({"schedule": name, **_checked(schedule)})
        if not machine:
            echo(console, Picture(schedule, aligned=None, width=console.width if console.is_terminal else None))
            console.print(_told(facts[-1]), "\n", sep="")
    if machine:
        typer.echo(json.dumps(facts, indent=2))
        return
    console.print("Next: penstock show --help, or in Python: import penstock as ps; ps.build('1F1B', ranks=4, ...)")


def _checked(schedule: Schedule) -> dict[str, object]:
    """Facts seen, not claimed: who runs what how often, the steps of a walk to the end, the files read back."""
    forwards = Counter(
        (leaf.stage_index, leaf.microbatch_index)
        for row in schedule.actions
        for cell in row
        if cell is not None
        for leaf in cell.leaves
        if leaf.computation_type is FORWARD
    )
    wanted = {(stage, number) for stage in range(schedule.stages) for number in range(schedule.microbatches)}
    steps = 1 + max(column for columns in unit_steps(schedule) for column in columns if column is not None)
    with tempfile.TemporaryDirectory() as folder:
        same = []
        for suffix in FORMATS:
            path = Path(folder, f"schedule{suffix}")
            schedule.write(path)
            same.append(read(path) == schedule)
    return {
        "every_forward_once": forwards == Counter(wanted),
        "steps_to_the_end": steps,
        "formats_read_back_equal": dict(zip(FORMATS, same, strict=True)),
    }


def _told(facts: dict[str, object]) -> str:
    once = "every stage runs every microbatch once" if facts["every_forward_once"] else "[red]forwards are missing[/]"
    formats = facts["formats_read_back_equal"]
    assert isinstance(formats, dict)
    equal = ", ".join(suffix for suffix, same in formats.items() if same)
    return f"checked: {once}; no rank waits for ever ({facts['steps_to_the_end']} steps); reads back equal from {equal}"
