"""Bounds the makespan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.simulation.bounds.area import held_area
from penstock.simulation.bounds.bound import Bound
from penstock.simulation.bounds.relaxation import relax
from penstock.simulation.bounds.window import Window, rounds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.bounds.relaxation import Relaxation
    from penstock.simulation.problem import Problem

    Floats = NDArray[np.float64]

_WORDS: Final = {
    "work": "rank {} has that much work, and waits before and after it",
    "path": "rank {} is on a chain of waits for inputs that takes as long",
    "memory": "rank {} is on a chain of waits for inputs and memory that takes as long",
    "machine": "rank {} runs one operation at a time, as inputs and memory allow",
    "area": "on rank {}, each activation takes memory for some time, and all have to fit below the limit",
}


def makespan_bounds(problem: Problem, relaxed: Relaxation) -> list[Bound]:
    """Return bounds on the time from the first start to the last end."""
    free = relax(replace(problem, memory_limit=np.full(problem.ranks, np.inf)))
    without, chains = Window.around_all(free), Window.around_all(relaxed)
    full = Window.around_all(relaxed, rounds(relaxed))
    named = [
        ("work", without.work_ends()),
        ("path", without.path_ends()),
        ("memory", chains.path_ends()),
        ("machine", full.machine_ends()),
    ]
    known = max(ends.max(initial=0.0) for _, ends in named)
    area = full.area_ends(problem, held_area(problem, relaxed), range(problem.ranks), known)
    return [_highest(name, ends) for name, ends in [*named, ("area", area)]]


def _highest(name: str, ends: Floats) -> Bound:
    rank = int(ends.argmax())
    return Bound(name, max(0.0, float(ends[rank])), rank, _WORDS[name].format(rank))
