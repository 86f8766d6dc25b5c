"""Defines the arguments of commands that simulate: costs from a file, and a communication model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.errors import CostsError
from penstock.simulation.costs import Costs

CostsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        "-c",
        metavar="FILE",
        help="A .toml or .json file with the fields of Costs (default: F, I and W take 1 each).",
    ),
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="How communication behaves, e.g. rendezvous:pair; by default transfers do not contend.",
    ),
]


PerRank: TypeAlias = Annotated[
    bool,
    typer.Option("--per-rank", help="Costs are those of whole ranks, shared by their stages, as in penstock compare."),
]


def costs_from(path: Path | None) -> Costs:
    """Return the costs in the file, or the default ones."""
    return Costs() if path is None else Costs.read(path)


@contextmanager
def naming_costs_file(path: Path | None) -> Iterator[None]:
    """Name the file in errors about the costs in it."""
    try:
        yield
    except CostsError as error:
        if path is None:
            raise
        raise CostsError(f"{path}: {error}", field=error.field, value=error.value) from None


def format_number(number: float) -> str:
    """Format a number with six digits, or with all digits before the decimal point."""
    return f"{number:,.0f}" if 1e6 <= abs(number) < 1e15 else f"{number:.6g}"
