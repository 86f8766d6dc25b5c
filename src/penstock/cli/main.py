"""The ``penstock`` command and what it does with errors: one line, exit code 2."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from penstock.cli.check import FOUND, check_command
from penstock.cli.convert import convert
from penstock.cli.demo import demo
from penstock.cli.show import show
from penstock.errors import PenstockError, VerificationError
from penstock.version import __version__

BAD_INPUT = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(show)
app.command("check")(check_command)
app.command()(convert)
app.command()(demo)


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
    """Pipeline-parallel schedules as data: build, draw, prove, read and write them."""


def main() -> None:
    """Run the command line."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `penstock show ... | head` ends like any other command
    try:
        app()
    except VerificationError as error:
        typer.echo(f"penstock: {error}", err=True)
        sys.exit(FOUND)
    except (PenstockError, OSError) as error:
        typer.echo(f"penstock: {error}", err=True)
        sys.exit(BAD_INPUT)
    except MemoryError:
        typer.echo("penstock: there is not enough memory for a schedule of this size", err=True)
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
