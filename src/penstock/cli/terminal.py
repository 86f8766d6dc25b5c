"""The terminal, and how wide it is."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer
from rich.console import Console

#: Nothing is laid out for less: the table of communication models is as wide as that.
NARROWEST: Final = 44

Width: TypeAlias = Annotated[
    int | None, typer.Option("--width", min=20, help="Fit into so many columns; by default into the terminal.")
]


def terminal(width: int | None = None) -> Console:
    """The terminal, or the pipe that there is in its place; of this width, if given."""
    console = Console(highlight=False, width=width)
    if width is None and console.width < NARROWEST:  # COLUMNS=0, most likely
        console.width = NARROWEST
    return console


def layout_width(console: Console, width: int | None = None) -> int | None:
    """The width that pictures have to fit into; None for a pipe, unless a width was asked for."""
    return console.width if width is not None or console.is_terminal else None
