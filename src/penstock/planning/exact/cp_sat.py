"""Loads CP-SAT, the solver of OR-tools, when it is first needed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

#: What to run to get the solver.
INSTALL: Final = "pip install 'penstock[exact]'"


def is_available() -> bool:
    """Return whether OR-tools is installed."""
    return find_spec("ortools") is not None


def cp_model() -> Any:
    """Return the module of the solver.

    Raises:
        PlanError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model as module
    except ImportError as error:
        raise PlanError(f"exact search needs OR-tools ({error}); {INSTALL}") from None
    return module


def solution_callback(receive: Callable[[Any], None]) -> Any:
    """Return a callback for the solver that passes itself on at each solution, to be asked for values."""
    from ortools.sat.python import cp_model as module

    class Callback(module.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            receive(self)

    return Callback()
