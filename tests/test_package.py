import importlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

import penstock as ps
from penstock import errors

PUBLIC = [
    "Action",
    "ActionError",
    "CommModel",
    "ComputationType",
    "Finding",
    "FormatError",
    "LANES",
    "ModelError",
    "PenstockError",
    "Placement",
    "PlacementError",
    "ReadError",
    "Schedule",
    "ScheduleError",
    "ScheduleSyntaxError",
    "SizeError",
    "UnknownScheduleError",
    "VerificationError",
    "WriteError",
    "__version__",
    "build",
    "check",
    "lower",
    "read",
    "repair",
    "safe_models",
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


def test_the_import_loads_neither_torch_nor_numba_nor_numpy():
    loaded = run("import penstock, sys; print(*sorted(sys.modules))").split()
    assert "penstock" in loaded
    assert not {"torch", "numba", "numpy", "typer", "rich"} & set(loaded)


def test_using_it_loads_neither_torch_nor_numba():
    code = "import penstock as ps, sys; ps.build('ZBVZeroBubble', ranks=2, microbatches=2).grid(); print(*sys.modules)"
    assert not {"torch", "numba"} & set(run(code).split())


def test_the_command_line_loads_neither_torch_nor_numba():
    assert not {"torch", "numba"} & set(run("import penstock.cli.main, sys; print(*sys.modules)").split())


def test_the_import_is_quick():
    """0.15 s is the promise, and it takes about 0.01 s: a bound that a busy machine keeps."""

    def seconds(code):
        begin = perf_counter()
        run(code)
        return perf_counter() - begin

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


def test_no_print_and_no_torch_outside_their_layers():
    source = Path(ps.__file__).parent
    for path in source.rglob("*.py"):
        layer = path.relative_to(source).parts[0]
        if layer not in ("runtime", "pipelining"):
            assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE), path
