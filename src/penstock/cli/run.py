"""``penstock run``: run a training script on several local processes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli.launch import GRACE, OnLine, launch
from penstock.cli.source import DEFAULT_RANKS
from penstock.cli.traced import VARIABLE, check_suffix, trace_folder
from penstock.dropin.environment import environment

#: Everything after the script belongs to the script.
RUN_SETTINGS: Final = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}

#: Options after the script that were probably meant for ``penstock run``.
_MISPLACED: Final[Mapping[str, re.Pattern[str]]] = {
    "ranks": re.compile(r"--ranks(=.*)?|-r\d*"),
    "drop_in": re.compile(r"--drop-in"),
    "no_prefix": re.compile(r"--no-prefix"),
    "timeout": re.compile(r"--timeout(=.*)?"),
    "grace": re.compile(r"--grace(=.*)?"),
    "trace": re.compile(r"--trace(=.*)?"),
}


def _not_torchrun(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter(f"this is torchrun's option; use --ranks {value}")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module with --module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.", show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, help="Number of processes.")] = DEFAULT_RANKS,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, like python -m.")] = False,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not prefix each line with its rank.")] = False,
    drop_in: Annotated[
        bool,
        typer.Option("--drop-in", help="Make torch.distributed.pipelining penstock.pipelining in every process."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write what the ranks did: a page (.html), a timeline (.json), .png or .svg.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Terminate after this time, with exit code 124."),
    ] = None,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", help="How long the processes may take to end after SIGTERM."),
    ] = GRACE,
    _nproc: Annotated[
        str | None,
        typer.Option("--nproc-per-node", "--nproc_per_node", hidden=True, callback=_not_torchrun),
    ] = None,
) -> None:
    """Run a script in several processes on this machine, one per rank.

    Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun;
    and, unless they are set, OMP_NUM_THREADS, for its share of the cores, GLOO_SOCKET_IFNAME, for this machine only,
    PYTHONUNBUFFERED, and TORCH_CPP_LOG_LEVEL=ERROR, without which torch prints C++ frames when another rank exits.

    When a rank fails, the others have a few seconds to report what they know before they are terminated. The last line
    names the ranks that failed on their own: first those killed by a signal, then exit codes other than 1, then 1, as
    after an exception. The exit code is that of the first one; 128 plus the signal if it was killed.

    Ctrl-C terminates all ranks. SIGTERM is passed on to them; if all of them end with exit code 0 in time, as with
    penstock.stop_on_signal, so does this command.

    Example: penstock run --ranks 4 train.py

    With --drop-in, an unmodified program for torch.distributed.pipelining runs on penstock.pipelining; rank 0 reports
    it in one line. The equivalent with torchrun: torchrun ... -m penstock.dropin train.py

    Example: penstock run --ranks 2 --timeout 600 --module project.train

    Example: penstock run --ranks 2 --drop-in train.py

    With --trace, every penstock.runtime.Pipeline takes the times of its steps, without changes to the script. When the
    run ends, also by a failure or Ctrl-C, the timeline of a step is written: of those that all ranks still hold, the
    one of median length; a page also shows the last step if it was not finished.

    Example: penstock run --ranks 4 --trace measured.html train.py
    """
    if not module and Path(script).is_dir():
        raise typer.BadParameter(f"{script} is a directory; expected a Python file", param_hint="SCRIPT")
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"file {script} does not exist; add --module to run a module", param_hint="SCRIPT")
    if timeout is not None and not timeout > 0:
        raise typer.BadParameter(f"must be a positive number of seconds, got {timeout}", param_hint="--timeout")
    if not grace >= 0:
        raise typer.BadParameter(f"must be a number of seconds, got {grace}", param_hint="--grace")
    for warning in _misplaced(context, arguments or []):
        typer.echo(f"penstock: {warning}", err=True)
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or [])]
    on_line = _writer(prefix=not no_prefix) if ranks > 1 else None
    variables = dict(environment(os.environ) if drop_in else os.environ)
    try:
        with ExitStack() as when_done:
            if trace is not None:
                check_suffix(trace)
                variables[VARIABLE] = when_done.enter_context(trace_folder(trace))
            outcome = launch(command, ranks, on_line=on_line, timeout=timeout, grace=grace, environment=variables)
    except KeyboardInterrupt:
        typer.echo("penstock: interrupted; all processes have ended", err=True)
        raise
    if outcome.summary:
        typer.echo(f"penstock: {outcome.summary}", err=True)
    raise typer.Exit(outcome.code)


def _misplaced(context: typer.Context, arguments: Sequence[str]) -> list[str]:
    """Return warnings about options after the script, unless they are also before it."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    found = []
    for name, pattern in _MISPLACED.items():
        source = context.get_parameter_source(name)
        option = next(filter(pattern.fullmatch, own), None)
        if option is not None and source is not None and source.name == "DEFAULT":
            started = f"; starting {context.params[name]} ranks" if name == "ranks" else ""
            found.append(f"{option} comes after the script, so it is passed to the script{started}")
    return [f"{warning}. Put options of penstock run before the script" for warning in found]


def _writer(*, prefix: bool) -> OnLine:
    """Return a function that writes whole lines to the stream that their rank wrote to."""

    def write(rank: int, is_error: bool, line: str) -> None:
        stream = sys.stderr if is_error else sys.stdout
        stream.write(f"rank {rank}: {line}\n" if prefix else f"{line}\n")
        stream.flush()

    return write
