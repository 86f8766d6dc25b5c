"""Plans for several memory limits, numbers of microbatches or of ranks, to see what each would buy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import PlanError
from penstock.planning.plan import plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.planning.result import Plan

#: What can vary.
VARIABLES: Final = ("memory", "microbatches", "ranks")

#: How many memory limits are tried, from the smallest possible one to the one that changes nothing any more.
MEMORY_LIMITS: Final = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A plan for one value of what varies.

    Attributes:
        value: the memory limit, or the number of microbatches or ranks.
        plan: the plan.
        is_better: whether no point with less of what varies is as good: it is on the Pareto front of time per
            microbatch and memory, microbatches or ranks.
    """

    value: float
    plan: Plan
    is_better: bool

    @property
    def time_per_microbatch(self) -> float:
        """What the objective says, per microbatch."""
        return self.plan.value / self.plan.schedule.microbatches

    @property
    def peak_memory(self) -> float:
        """The most that any rank holds."""
        return max(self.plan.timeline.peak_memory)


def sweep(variable: str, values: Sequence[float] | None = None, **arguments: Any) -> Iterator[Point]:
    """Yield a plan for every value, from the smallest to the largest, as they are found.

    A schedule that fits a smaller memory limit fits a larger one, so with more memory the time never rises.

    An interruption ends it, with the plan of that moment.

    Args:
        variable: ``"memory"``, ``"microbatches"`` or ``"ranks"``.
        values: its values; by default from the smallest possible memory limit to where more does not help, or powers of
            two up to four times the given number.
        arguments: those of ``plan``.

    >>> [(point.value, point.plan.value) for point in sweep("microbatches", [4, 8], ranks=4, microbatches=8)]
    [(4, 12.75), (8, 24.75)]
    """
    if variable not in VARIABLES:
        raise PlanError(f"cannot sweep {variable!r}; choose one of {', '.join(VARIABLES)}", field="sweep")
    field = {"memory": "memory_limit"}.get(variable, variable)
    best: Plan | None = None
    lowest = float("inf")
    for value in _values(variable, arguments) if values is None else sorted(values):
        found = plan(**{**arguments, field: value})
        if variable == "memory" and best is not None and best.value <= found.value:
            # The schedule of less memory is as good, but what was proved is about this limit.
            found = replace(
                best,
                memory_limit=found.memory_limit,
                lower_bound=min(found.lower_bound, best.value),
                bound_reason=found.bound_reason,
                interrupted=found.interrupted,
            )
        best = found
        per_microbatch = found.value / found.schedule.microbatches
        yield Point(value, found, per_microbatch < lowest * (1 - 1e-9))
        lowest = min(lowest, per_microbatch)
        if found.interrupted:
            return


def _values(variable: str, arguments: dict[str, Any]) -> list[float]:
    if variable != "memory":
        given = arguments.get(variable)
        if given is None:
            raise PlanError(f"say around which number of {variable} to sweep, e.g. {variable}=8", field=variable)
        return sorted({max(1, round(given * factor)) for factor in (0.25, 0.5, 1, 2, 4)})
    unlimited = plan(**{**arguments, "memory_limit": None, "effort": min(0.1, arguments.get("effort", 1.0))})
    try:
        plan(**{**arguments, "memory_limit": 0})
    except PlanError as error:
        least = error.smallest or 0.0
    else:
        least = 0.0
    most = max(max(each.timeline.peak_memory) for each in unlimited.alternatives if each.value <= unlimited.value)
    return [float(each) for each in np.linspace(least, max(least, most), MEMORY_LIMITS)]
