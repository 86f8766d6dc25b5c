"""Writes a plan as the settings of training frameworks, for ``penstock plan --for``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from penstock.errors import PlanError
from penstock.ir.formats.files import write_atomically

Frameworks: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--for",
        metavar="FRAMEWORK",
        help="Write settings, too, in a folder FRAMEWORK: torch, torchtitan, automodel, megatron or primus; "
        "may be repeated.",
    ),
]


def check_frameworks(frameworks: Sequence[str], *, sweep: str | None) -> None:
    """Raise an error for an unknown framework, or more than one plan, before anything is searched."""
    from penstock.planning.frameworks.registry import check_framework

    if frameworks and sweep is not None:
        raise PlanError("--for writes one plan, but --sweep makes several; omit one of them", field="framework")
    for each in frameworks:
        check_framework(each)


def write_settings(plan: Any, frameworks: Sequence[str], folder: Path) -> list[tuple[Any, list[Path]]]:
    """Write the files of every framework into a folder with its name; return the settings and what was written."""
    done = []
    for framework in dict.fromkeys(frameworks):
        settings = plan.settings(framework)
        place = folder / framework
        place.mkdir(parents=True, exist_ok=True)
        for name, content in settings.files.items():
            write_atomically(place / name, content)
        done.append((settings, [place / name for name in settings.files]))
    return done


def show_settings(console: Console, done: Sequence[tuple[Any, list[Path]]]) -> None:
    """Print the settings, what the framework does differently, and which files were written."""
    for settings, paths in done:
        console.print(Text(f"\nfor {settings.framework}:", style="bold"))
        console.print(Text(settings.text.rstrip()), soft_wrap=True)
        for note in settings.notes:
            console.print(Text(f"note: {note}"), soft_wrap=True)
        for path in paths:
            console.print(Text(f"wrote {path}"), soft_wrap=True)


def settings_facts(done: Sequence[tuple[Any, list[Path]]]) -> list[dict[str, Any]]:
    """Return the facts, as in JSON."""
    return [
        {
            "framework": settings.framework,
            "schedule": settings.schedule.metadata.get("name"),
            "makespan": settings.value,
            "planned_makespan": settings.planned,
            "text": settings.text,
            "notes": list(settings.notes),
            "files": [str(path) for path in paths],
        }
        for settings, paths in done
    ]
