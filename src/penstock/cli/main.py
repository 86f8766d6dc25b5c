"""The ``penstock`` command and what it does with errors: one line, exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.convert import convert
from penstock.cli.demo import demo
from penstock.cli.show import show
from penstock.errors import PenstockError
from penstock.version import __version__

BAD_INPUT = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (show, convert, demo):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pipeline-parallel schedules as data: build, draw, read and write them."""


def main() -> None:
    """Run the command line."""
    try:
        app()
    except PenstockError as error:
        typer.echo(f"penstock: {error}", err=True)
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
