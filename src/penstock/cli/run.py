"""``penstock run``: a training script on several local processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli.launch import Hear, launch
from penstock.cli.source import DEFAULT_RANKS

#: What comes after the script is the script's.
RUN_SETTINGS: Final = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


def run(
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
) -> None:
    """Run a script on several processes of this machine, one for each rank.

    Each gets RANK, WORLD_SIZE, MASTER_ADDR and what else torchrun sets: the same script runs under both. When a rank
    fails, the others have a few seconds to say what they know, and are ended; its exit code is the exit code. Ctrl-C
    ends all.

    Example: penstock run --ranks 4 train.py --steps 100

    Example: penstock run --ranks 2 --timeout 600 --module project.train
    """
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}; for a module, add --module", param_hint="SCRIPT")
    if timeout is not None and not timeout > 0:
        raise typer.BadParameter(f"it is a number of seconds, more than 0, not {timeout}", param_hint="--timeout")
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or [])]
    outcome = launch(command, ranks, hear=_writer(prefix=not no_prefix) if ranks > 1 else None, timeout=timeout)
    if outcome.told:
        typer.echo(f"penstock: {outcome.told}", err=True)
    raise typer.Exit(outcome.code)


def _writer(*, prefix: bool) -> Hear:
    """Write every line where its rank has written it, and whole."""

    def write(rank: int, is_error: bool, line: str) -> None:
        stream = sys.stderr if is_error else sys.stdout
        stream.write(f"rank {rank}: {line}\n" if prefix else f"{line}\n")
        stream.flush()

    return write
