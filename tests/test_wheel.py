"""The built wheel in environments of its own: complete, and every command's first example runs from it."""

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cli.test_first_examples import COMMANDS, WITH_TORCH, first_example, script_of_the_readme

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.full, pytest.mark.processes]


def call(*command, cwd=None):
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "80",
    }
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert result.returncode == 0, f"{shlex.join(map(str, command))}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("penstock-*.whl")
    return path


@pytest.fixture(scope="module", params=["", "[torch]"], ids=["without torch", "with torch"])
def environment(wheel, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", folder)
    call(folder / "bin" / "pip", "install", "--quiet", f"{wheel}{request.param}")
    return folder / "bin", bool(request.param)


def test_the_wheel_carries_what_the_package_reads(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assets = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/penstock/view/assets").iterdir()}
    assert assets | {"penstock/py.typed"} < names
    assert not [name for name in names if not name.startswith("penstock")]


def test_every_first_example_runs_from_it(environment, tmp_path):
    programs, has_torch = environment
    (tmp_path / "train.py").write_text(script_of_the_readme())
    for command in COMMANDS:
        if has_torch or command not in WITH_TORCH:
            call(programs / "penstock", *shlex.split(first_example(command))[1:], cwd=tmp_path)


def test_what_needs_torch_says_so_without_it(environment, tmp_path):
    programs, has_torch = environment
    if not has_torch:
        result = subprocess.run(
            [programs / "penstock", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert "pip install 'penstock[torch]'" in result.stderr
