"""Lets the exact solver finish what the search began: small problems always, larger ones if time was given for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.planning import exact
from penstock.simulation.bounds import Bound, Bounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.planning.planner import Planner

#: The number of actions up to which the solver is asked in any case: it takes a fraction of a second.
SMALL: Final = 100
#: The number of actions up to which a problem is searched as a whole, and not window by window.
WHOLE: Final = 600


def search_exactly(planner: Planner, seconds: float | None, seed: int, report: Callable[[str], object]) -> None:
    """Improve and prove the best orders of the sites that can still win.

    The proof of a site counts for the plan only if the site leaves nothing else open, such as what to recompute, and
    no overlap makes actions faster, or saves a dispatch, of which the solver knows nothing.
    """
    if not exact.is_available() or planner.objective.is_random:
        return
    numbers = sorted(range(len(planner.sites)), key=lambda number: planner.bounds[number].best)
    sizes = {number: _size(planner, number) for number in numbers}
    chosen = [number for number in numbers if sizes[number] <= (math.inf if seconds else SMALL)]
    for number in chosen:
        site, search = planner.sites[number], planner.searches[number]
        if not planner.can_win(number) or np.any(site.problem.costs.edge_memory):  # it does not know what waits
            continue
        report(f"searching exactly with {site.name}")
        assert search.best is not None
        costs = site.problem.costs
        proves = site.relaxed is site.problem and costs.overlap >= 1 and not costs.dispatch
        arguments: dict[str, Any] = {
            "floor": planner.bounds[number].best if proves else 0.0,
            "time_limit": seconds / len(chosen) if seconds else math.inf,
            "seed": seed,
        }
        ask = site.problem, planner.objective.name, search.best.order
        if sizes[number] > WHOLE:
            found = exact.improve(*ask, **arguments)
        else:
            found = exact.solve(*ask, **arguments, effort=math.inf if seconds else planner.effort)
        search.add("exact search", found.order)
        planner.exact_orders.append((site, found.order))
        if proves and found.bound > planner.bounds[number].best:
            how = "exhaustive" if found.optimal else "unfinished exact"
            words = f"no order with {site.name} is better, by {how} search"
            planner.bounds[number] = Bounds(planner.objective.name, (Bound("exact", found.bound, 0, words),))
        if found.interrupted:
            raise KeyboardInterrupt


def _size(planner: Planner, number: int) -> int:
    best = planner.searches[number].best
    return len(best.order.tokens) if best else 0
