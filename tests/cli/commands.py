"""The ``penstock`` command where the tests run: most of what it does needs no process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from penstock.cli.main import main

PLAIN = {"NO_COLOR": "1", "COLUMNS": "80"}


@dataclass(frozen=True)
class Done:
    """What a command has written, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def penstock(*arguments: str, cwd: Path | None = None) -> Done:
    """Run the command through its entry point, as in a pipe that is 80 columns wide."""
    out, err = io.StringIO(), io.StringIO()
    plain = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | PLAIN
    with (
        mock.patch.dict(os.environ, plain, clear=True),
        mock.patch.object(sys, "argv", ["penstock", *arguments]),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _handlers_kept(),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return Done(end.value.code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """The command sets handlers of signals, for a process that ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
