"""The first example of each command's help runs as it stands, in an empty folder with the script of the README."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli.commands import penstock
from penstock.cli.app import app

ROOT = Path(__file__).parents[2]
#: These need torch, and most of them start processes.
WITH_TORCH = ["demo", "describe", "profile", "run"]


COMMANDS = typer.main.get_command(app).commands


def first_example(command):
    return re.search(r"Example: (penstock .*)", COMMANDS[command].help)[1]


def script_of_the_readme():
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def run(command, folder):
    (folder / "train.py").write_text(script_of_the_readme())
    program = Path(sys.executable).with_name("penstock")
    return subprocess.run(
        [program, *shlex.split(first_example(command))[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_every_command_has_an_example():
    assert set(WITH_TORCH) < set(COMMANDS)
    assert all(map(first_example, COMMANDS))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_example_is_broken_inside_a_word(command):
    """The help is wrapped, also after hyphens: what is copied from it must be what was meant."""
    shown = " ".join(penstock(command, "--help").stdout.split())
    for example in re.findall(r"Example: (penstock .*)", COMMANDS[command].help):
        assert example in shown


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in WITH_TORCH])
def test_the_first_example_runs(command, tmp_path):
    result = penstock(*shlex.split(first_example(command))[1:], cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.processes
@pytest.mark.parametrize("command", ["describe", "run"])
def test_the_first_example_with_torch_runs(command, tmp_path):
    result = run(command, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("command", ["demo", "profile"])
def test_the_first_example_that_takes_longer_runs(command, tmp_path):
    result = run(command, tmp_path)
    assert result.returncode == 0, result.stderr
