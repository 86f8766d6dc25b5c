"""Defines the arguments of every command: the name of a schedule with its sizes, or a file."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from penstock.errors import ModelError, SizeError, UnknownScheduleError
from penstock.graph.comm_model import CommModel
from penstock.ir.formats import FORMATS, read
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import build, recipe
from penstock.simulation.costs import Costs

DEFAULT_RANKS = 4
DEFAULT_MICROBATCHES = 8

Source: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A schedule, or a .csv, .json or .txt file.")
]
Ranks: TypeAlias = Annotated[
    int | None, typer.Option("--ranks", "-r", help=f"Number of ranks.  [default: {DEFAULT_RANKS}]")
]
Microbatches: TypeAlias = Annotated[
    int | None, typer.Option("--microbatches", "-m", help=f"Number of microbatches.  [default: {DEFAULT_MICROBATCHES}]")
]
StagesPerRank: TypeAlias = Annotated[
    int | None,
    typer.Option("--stages-per-rank", "-s", help="Number of stages per rank, for schedules that allow several."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: The suffix of a file of another format.
_SUFFIX: Final = re.compile(r"\.[A-Za-z]{1,4}")


def schedule_from(
    source: str, *, ranks: int | None = None, microbatches: int | None = None, stages_per_rank: int | None = None
) -> Schedule:
    """Read the file, or build the schedule with this name."""
    if not is_file(source):
        try:
            return build(
                source,
                ranks=DEFAULT_RANKS if ranks is None else ranks,
                microbatches=DEFAULT_MICROBATCHES if microbatches is None else microbatches,
                stages_per_rank=stages_per_rank,
            )
        except SizeError as fact:
            words = str(fact).replace("stages_per_rank", "--stages-per-rank")
            raise SizeError(words, field=fact.field, value=fact.value) from None
    sizes = {"ranks": ranks, "microbatches": microbatches, "stages-per-rank": stages_per_rank}
    for field, value in sizes.items():
        if value is not None:
            raise SizeError(f"{source} has its own sizes; omit --{field} {value}", field=field, value=value)
    return read(source)


def build_fitted(source: str, plain: Schedule, costs: Costs) -> Schedule:
    """Build the schedule with this name again for these costs."""
    if is_file(source) or not recipe(source).fits_costs:
        why = "has its own order" if is_file(source) else "does not depend on costs"
        raise SizeError(f"{source} {why}; omit --fit", field="fit", value=True)
    stages_per_rank = plain.stages // plain.ranks
    return build(
        source, ranks=plain.ranks, microbatches=plain.microbatches, stages_per_rank=stages_per_rank, costs=costs
    )


def is_file(source: str) -> bool:
    """Return whether this is a file: it is named like one, or it exists and no schedule has this name."""
    path = Path(source)
    if path.suffix.lower() in FORMATS or len(path.parts) > 1:
        return True
    if _is_name(source):
        return False
    with suppress(OSError, ValueError):  # a name that is too long, or contains a NUL
        return _SUFFIX.fullmatch(path.suffix) is not None or path.exists()
    return False


def _is_name(source: str) -> bool:
    try:
        recipe(source)
    except UnknownScheduleError:
        return False
    return True


def parse_model(text: str) -> CommModel:
    """Parse a communication model written as ``buffering:lanes``."""
    buffering, colon, lanes = text.partition(":")
    if not colon:
        raise ModelError(f"{text!r} is not a communication model; write e.g. 'rendezvous:pair' or 'bounded(2):rank'")
    return CommModel(buffering, lanes)
