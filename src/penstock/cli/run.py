"""``penstock run``: a training script on several local processes."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli.launch import OnLine, launch
from penstock.cli.source import DEFAULT_RANKS

#: What comes after the script is the script's.
RUN_SETTINGS: Final = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}

#: What those options look like that are likely meant for ``penstock run`` where the script gets them.
_MISPLACED: Final[Mapping[str, re.Pattern[str]]] = {
    "ranks": re.compile(r"--ranks(=.*)?|-r\d*"),
    "no_prefix": re.compile(r"--no-prefix"),
    "timeout": re.compile(r"--timeout(=.*)?"),
}


def _not_torchrun(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter(f"that is an option of torchrun; here it is --ranks {value}")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with --module a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script gets.", show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="How many processes.")] = DEFAULT_RANKS,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    no_prefix: Annotated[
        bool, typer.Option("--no-prefix", help="Do not begin each line with the rank that wrote it.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="End it if it takes longer; the exit code is 124."),
    ] = None,
    _nproc: Annotated[
        str | None,
        typer.Option("--nproc-per-node", "--nproc_per_node", hidden=True, callback=_not_torchrun),
    ] = None,
) -> None:
    """Run a script on several processes of this machine, one for each rank.

    Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun; and, if
    they are not set, OMP_NUM_THREADS, for its share of the cores, GLOO_SOCKET_IFNAME, for this machine alone, and
    PYTHONUNBUFFERED.

    When a rank fails, the others have a few seconds to say what they know, and are ended. All that failed by themselves
    are named in the last line: first those that a signal has killed, then exit codes other than 1, then 1, which is
    what an exception leaves. The exit code is that of the first in this order; 128 and the signal, if it was killed.
    Ctrl-C ends all.

    Example: penstock run --ranks 4 train.py --steps 100

    Example: penstock run --ranks 2 --timeout 600 --module project.train
    """
    if not module and Path(script).is_dir():
        raise typer.BadParameter(f"{script} is a directory; name a Python file in it", param_hint="SCRIPT")
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}; for a module, add --module", param_hint="SCRIPT")
    if timeout is not None and not timeout > 0:
        raise typer.BadParameter(f"it is a number of seconds, more than 0, not {timeout}", param_hint="--timeout")
    for warning in _misplaced(context, arguments or []):
        typer.echo(f"penstock: {warning}", err=True)
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or [])]
    on_line = _writer(prefix=not no_prefix) if ranks > 1 else None
    try:
        outcome = launch(command, ranks, on_line=on_line, timeout=timeout)
    except KeyboardInterrupt:
        typer.echo("penstock: interrupted; every process has ended", err=True)
        raise
    if outcome.summary:
        typer.echo(f"penstock: {outcome.summary}", err=True)
    raise typer.Exit(outcome.code)


def _misplaced(context: typer.Context, arguments: Sequence[str]) -> list[str]:
    """What to say of options behind the script, if they do not stand before it as well."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    found = []
    for name, pattern in _MISPLACED.items():
        source = context.get_parameter_source(name)
        option = next(filter(pattern.fullmatch, own), None)
        if option is not None and source is not None and source.name == "DEFAULT":
            started = f"; {context.params[name]} ranks are started" if name == "ranks" else ""
            found.append(f"{option} stands behind the script, so the script gets it{started}")
    return [f"{warning}. Options of penstock run stand before it" for warning in found]


def _writer(*, prefix: bool) -> OnLine:
    """Write every line where its rank has written it, and whole."""

    def write(rank: int, is_error: bool, line: str) -> None:
        stream = sys.stderr if is_error else sys.stdout
        stream.write(f"rank {rank}: {line}\n" if prefix else f"{line}\n")
        stream.flush()

    return write
