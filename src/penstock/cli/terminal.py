"""Creates the console, and decides how wide it is."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer
from rich.console import Console

#: The minimum width, that of the table of communication models.
NARROWEST: Final = 44

Width: TypeAlias = Annotated[
    int | None, typer.Option("--width", min=20, help="Width in columns (default: the terminal's).")
]


def terminal(width: int | None = None) -> Console:
    """Return the console for the terminal, or for the pipe in its place, with this width if given."""
    console = Console(highlight=False, width=width)
    if width is None and console.width < NARROWEST:  # COLUMNS=0, most likely
        console.width = NARROWEST
    return console


def layout_width(console: Console, width: int | None = None) -> int | None:
    """Return the width that drawings have to fit; None for a pipe, unless a width was requested."""
    return console.width if width is not None or console.is_terminal else None
