"""Runs the cells of a notebook, one after the other, in one namespace.

Outputs are kept in the file. After a change to it, run it again with

    .venv/bin/python tests/notebooks.py examples/planner.ipynb
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> list[str]:
    """Run all cells; returns the text that each code cell writes, with the value of its last expression."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [run_cell("".join(cell["source"]), namespace) for cell in code_cells(notebook)]


def run_cell(source: str, namespace: dict[str, Any]) -> str:
    """Run one cell as a notebook does."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            if value is not None:
                written.write(f"{value!r}\n")
    return written.getvalue()


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kept_outputs(notebook: dict[str, Any]) -> list[str]:
    """The text that is kept in the file for each code cell."""
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in code_cells(notebook)]


def keep_outputs(notebook: dict[str, Any]) -> None:
    """Replace the outputs by what the cells write now."""
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook), strict=True), start=1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


if __name__ == "__main__":
    for name in sys.argv[1:]:
        content = json.loads(Path(name).read_text())
        keep_outputs(content)
        Path(name).write_text(json.dumps(content, indent=1) + "\n")
