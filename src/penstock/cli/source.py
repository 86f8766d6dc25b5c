"""What every command takes: the name of a schedule with its sizes, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.errors import SizeError
from penstock.ir.formats import FORMATS, read
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import build

DEFAULT_RANKS = 4
DEFAULT_MICROBATCHES = 8

Ranks: TypeAlias = Annotated[
    int | None, typer.Option("--ranks", "-r", help=f"How many ranks.  [default: {DEFAULT_RANKS}]")
]
Microbatches: TypeAlias = Annotated[
    int | None, typer.Option("--microbatches", "-m", help=f"How many microbatches.  [default: {DEFAULT_MICROBATCHES}]")
]
StagesPerRank: TypeAlias = Annotated[
    int | None,
    typer.Option("--stages-per-rank", "-s", help="How many stages on each rank, where the schedule leaves a choice."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Write JSON for machines.")]


def schedule_from(
    source: str, *, ranks: int | None = None, microbatches: int | None = None, stages_per_rank: int | None = None
) -> Schedule:
    """Read the file, or build the schedule of this name."""
    if not is_file(source):
        return build(
            source,
            ranks=DEFAULT_RANKS if ranks is None else ranks,
            microbatches=DEFAULT_MICROBATCHES if microbatches is None else microbatches,
            stages_per_rank=stages_per_rank,
        )
    sizes = {"ranks": ranks, "microbatches": microbatches, "stages-per-rank": stages_per_rank}
    for field, value in sizes.items():
        if value is not None:
            raise SizeError(f"{source} has its own sizes; leave --{field} {value} out", field=field, value=value)
    return read(source)


def is_file(source: str) -> bool:
    """Whether this means a file: it is called like one."""
    path = Path(source)
    return path.suffix.lower() in FORMATS or len(path.parts) > 1
