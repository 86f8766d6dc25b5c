"""What the commands that simulate take: costs from a file, and a communication model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli.source import model_from
from penstock.graph.models import CommModel
from penstock.simulation.costs import Costs

CostsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        "-c",
        metavar="FILE",
        help="A .toml or .json file with the fields of Costs; by default F, I and W take 1 each.",
    ),
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="How communication behaves, e.g. rendezvous:pair; by default transfers stand in nobody's way.",
    ),
]


def costs_from(path: Path | None) -> Costs:
    """The costs in the file, or the default ones."""
    return Costs() if path is None else Costs.read(path)


def model_named(text: str | None) -> CommModel | None:
    """The model of this name, or None."""
    return None if text is None else model_from(text)
