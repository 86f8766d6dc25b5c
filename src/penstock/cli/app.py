"""Defines the ``penstock`` command and its subcommands."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.check import check_command
from penstock.cli.compare import compare
from penstock.cli.convert import convert
from penstock.cli.demo.command import demo
from penstock.cli.describe import describe
from penstock.cli.plan import plan
from penstock.cli.profile import profile
from penstock.cli.run import RUN_SETTINGS, run
from penstock.cli.show import show
from penstock.cli.simulate import simulate_command
from penstock.cli.view import view
from penstock.version import __version__


class _Commands(TyperGroup):
    """The commands, with a suggestion for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            near = get_close_matches(name, self.commands)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"The commands are {', '.join(self.commands)}."
            ctx.fail(f"No such command '{name}'. {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(show)
app.command("check")(check_command)
app.command("simulate")(simulate_command)
app.command()(compare)
app.command()(plan)
app.command()(describe)
app.command()(profile)
app.command()(view)
app.command()(convert)
app.command(context_settings=RUN_SETTINGS)(run)
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
    """Build, draw, verify, simulate, plan, run, read and write pipeline-parallel schedules; split models for them."""
