import ast
import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from statistics import median

import pytest

import penstock as ps
from penstock import errors

PUBLIC = [
    "Action",
    "ActionError",
    "CheckpointError",
    "CommModel",
    "ComputationType",
    "Costs",
    "CostsError",
    "DropInError",
    "Edge",
    "EdgeError",
    "Finding",
    "FormatError",
    "GenerationError",
    "LANES",
    "MetadataError",
    "MicrobatchError",
    "ModelError",
    "Optimizer",
    "PenstockError",
    "Placement",
    "Plan",
    "PlacementError",
    "PlanError",
    "ProgressLine",
    "ReadError",
    "RunError",
    "Samples",
    "Schedule",
    "ScheduleError",
    "ScheduleSyntaxError",
    "SizeError",
    "SplitError",
    "StageError",
    "StepError",
    "Stop",
    "Tie",
    "Timeline",
    "TraceError",
    "TransportError",
    "UnknownScheduleError",
    "VerificationError",
    "WriteError",
    "__version__",
    "build",
    "check",
    "export",
    "load",
    "lower",
    "plan",
    "profile",
    "read",
    "repair",
    "safe_models",
    "save",
    "simulate",
    "simulate_many",
    "split",
    "stop_on_signal",
    "verify",
]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_public_names():
    assert sorted(ps.__all__) == sorted(PUBLIC)
    assert {name for name in dir(ps) if not name.startswith("_")} >= set(PUBLIC) - {"__version__"}
    assert set(ps._HOMES) == set(PUBLIC) - {"__version__"}
    for name in PUBLIC:
        assert getattr(ps, name) is not None
    for name, home in ps._HOMES.items():
        assert getattr(ps, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_attribute():
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'sheduel'"):
        _ = ps.sheduel


def test_the_version_is_that_of_the_distribution():
    assert metadata.version("penstock") == ps.__version__


@pytest.mark.processes
def test_the_import_loads_neither_torch_nor_numba_nor_numpy():
    loaded = run("import penstock, sys; print(*sorted(sys.modules))").split()
    assert "penstock" in loaded
    assert not {"torch", "numba", "numpy", "typer", "rich"} & set(loaded)


@pytest.mark.processes
def test_using_it_loads_neither_torch_nor_numba():
    code = "import penstock as ps, sys; ps.build('ZBVZeroBubble', ranks=2, microbatches=2).grid(); print(*sys.modules)"
    assert not {"torch", "numba"} & set(run(code).split())


@pytest.mark.processes
def test_the_command_line_loads_neither_torch_nor_numba():
    assert not {"torch", "numba"} & set(run("import penstock.cli.app, sys; print(*sys.modules)").split())


@pytest.mark.processes
def test_the_import_is_quick():
    """0.15 s is the promise, and it takes about 0.01 s. Processor time counts: a busy machine makes others wait."""

    def seconds(code):
        before = os.times()
        run(code)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    bare, ours = zip(*((seconds("pass"), seconds("import penstock")) for _ in range(5)), strict=True)
    assert median(ours) - median(bare) < 0.15


def test_the_tree_drawn_in_errors_is_the_tree():
    drawn = re.findall(r"^    ([│ ├└─]*)(\w+Error)\b", errors.__doc__, re.MULTILINE)
    parents, tree = [], {}
    for lead, name in drawn:
        depth = len(lead) // 4
        parents[depth:] = [name]
        tree[name] = parents[depth - 1] if depth else "Exception"
    real = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert tree == real
    assert set(tree) <= set(ps.__all__)


EXAMPLES = [
    errors.PenstockError("wrong"),
    errors.ActionError("wrong"),
    errors.PlacementError("wrong", stage=1, places=[(0, 1)]),
    errors.SizeError("wrong", field="ranks", value=0),
    errors.ModelError("wrong"),
    errors.PlanError("no", field="memory_limit", value=1, smallest=2.0, rank=3),
    errors.UnknownScheduleError("1F2B", near=["1F1B"], known=["1F1B", "GPipe"]),
    errors.FormatError("wrong", path="it.csv", row=1, cell=2),
    errors.ScheduleSyntaxError("wrong", text="2Q1", row=1, cell=2),
    errors.WriteError("wrong"),
    errors.RunError("wrong"),
    errors.StageError("wrong", stage=3),
    errors.MicrobatchError("wrong", name="args[0]"),
    errors.MetadataError("wrong"),
    errors.TransportError("wrong", peer=1),
    errors.CheckpointError("wrong", path="run/step-1", rank=1),
    errors.StepError("wrong", rank=1, action="2F0", stage=2, microbatch=0, remote_traceback="Traceback"),
    errors.VerificationError(ps.check(ps.Schedule([["0B0", "0F0"]])), "a picture"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_go_between_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) == str(copy.copy(error))
    assert again.__dict__.keys() == error.__dict__.keys()


#: What a file or a layer imports when it is asked for, and says how to install if it is not there.
_OPTIONAL = {
    "chart.py": {"matplotlib"},
    "front.py": {"matplotlib"},
    "cp_sat.py": {"ortools"},
    "_schedule_visualizer.py": {"matplotlib"},
    "weights": {"safetensors", "transformers"},
    "stage_cache.py": {"transformers"},
    "execution": {"torch"},
    "models": {"torch"},
    "runtime": {"torch"},
    "pipelining": {"torch"},
}


def test_what_is_imported_is_declared():
    """An install without extras must do: what other packages bring along may be gone tomorrow."""
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", need)[0] for need in project["dependencies"]}
    for path in (root / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"penstock"}
        places = {path.name, path.parent.name, path.relative_to(root / "src" / "penstock").parts[0]}
        assert foreign <= declared.union(*(_OPTIONAL.get(place, set()) for place in places)), path


def test_torch_is_imported_only_in_its_layers():
    source = Path(ps.__file__).parent
    for path in source.rglob("*.py"):
        layer = path.relative_to(source).parts[0]
        if layer not in ("execution", "models", "runtime", "pipelining"):
            assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE), path
