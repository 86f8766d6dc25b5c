"""How the drop-in finds modules, and what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.dropin import environment

pytestmark = pytest.mark.processes


def python(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **variables},
    )
    return done.returncode, done.stdout, done.stderr


def dropin(*arguments, **variables):
    return python("-m", "penstock.dropin", *arguments, **variables)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


BY_PATH = """
import importlib.util, torch
from pathlib import Path
file = Path(torch.__file__).parent / "distributed/pipelining/_utils.py"
spec = importlib.util.spec_from_file_location("mine", file)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
NAMES = """
import copy, importlib, pickle, sys
import torch.distributed.pipelining as theirs
import penstock.pipelining as ours
from torch.distributed.pipelining.schedules import _Action
assert theirs is ours is sys.modules["torch.distributed"].pipelining
assert theirs.schedules is ours.schedules
assert ours.__spec__.name == ours.__name__ == "penstock.pipelining"
assert importlib.reload(ours.microbatch) is theirs.microbatch
assert pickle.loads(pickle.dumps(_Action(0, "F", 1)))[0] == 0
try:
    import torch.distributed.pipelining.other
except ImportError as error:
    print(error)
"""


def test_there_is_one_module_with_two_names(script):
    code, text, notice = dropin(script(NAMES))
    assert (code, text) == (
        0,
        "penstock.pipelining.other does not exist, so torch.distributed.pipelining.other cannot be replaced; "
        "run the program without the drop-in\n",
    )
    assert notice.count("\n") == 1


def test_files_of_torchs_package_are_refused(script):
    code, _, error = dropin(script(BY_PATH))
    assert code == 1
    assert re.search(
        r"DropInError: mine is to be loaded from \S+pipelining/_utils.py, but torch.distributed.pipelining is "
        r"penstock.pipelining in this process, and a mix of both does not work",
        error,
    )
    assert "the drop-in changed nothing, because torch.distributed.pipelining was not imported" in error


def test_after_torchs_package_it_is_too_late():
    code, _, error = python(
        "-c", "import torch.distributed.pipelining.stage, penstock.dropin; penstock.dropin.install()"
    )
    assert code == 1
    assert "DropInError: torch.distributed.pipelining has been imported already" in error


def test_a_program_runs_as_with_python(script, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    path = script("import sys, beside; print(__name__, sys.argv[1:], beside.WORD, sys.flags.dev_mode); sys.exit(3)")
    code, text, error = python("-X", "dev", "-m", "penstock.dropin", path, "-m", "--help")
    assert (code, text) == (3, "__main__ ['-m', '--help'] found True\n")
    assert "changed nothing" in error
    code, text, _ = dropin("-m", "json.tool", "--help")
    assert (code, "usage" in text) == (0, True)
    assert dropin()[0] == 2


def test_other_ranks_report_nothing(script):
    assert dropin(script("import torch.distributed.pipelining"), RANK="1") == (0, "", "")


def test_the_sitecustomize_of_the_environment_runs(script, tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import builtins; builtins.THEIRS = 1")
    code, text, _ = dropin(
        script("import sitecustomize; print(THEIRS, sitecustomize.__file__)"),
        PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    )
    assert (code, text) == (0, f"1 {folder / 'sitecustomize.py'}\n")


def test_an_interpreter_without_penstock_refuses(tmp_path):
    for package in ("torch", "torch/distributed", "torch/distributed/pipelining"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    code = "import sitecustomize, torch.distributed; import torch.distributed.pipelining"
    without = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S leaves out site-packages
        capture_output=True,
        text=True,
        check=False,
        env=environment({"PYTHONPATH": str(tmp_path)}),
    )
    assert without.returncode == 1
    assert "was started by a program that runs with penstock's drop-in, but has no penstock" in without.stderr


def test_the_environment_keeps_what_was_there():
    mine = str(Path("/somewhere"))
    once = environment({"PYTHONPATH": mine, "HOME": "/home"})
    assert once["PYTHONPATH"].split(os.pathsep)[1:] == [mine]
    assert once["HOME"] == "/home"
    assert environment(once) == once
