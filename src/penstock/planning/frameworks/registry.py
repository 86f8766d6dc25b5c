"""Lists the frameworks that a plan can be written for."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from penstock.errors import PlanError
from penstock.planning.frameworks import automodel, megatron, primus, torch_runtime, torchtitan
from penstock.planning.frameworks.settings import Request, Settings, request_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.ir.schedule import Schedule
    from penstock.simulation.costs import Costs

FRAMEWORKS: Final[Mapping[str, Callable[[Request], Settings]]] = {
    "torch": torch_runtime.settings,
    "torchtitan": torchtitan.settings,
    "automodel": automodel.settings,
    "megatron": megatron.settings,
    "primus": primus.settings,
}


def settings_for(
    framework: str,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    names: Iterable[Iterable[str]] | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Settings:
    """Write the settings with which a framework runs a schedule, or what comes nearest to it.

    Args:
        framework: its name; ``FRAMEWORKS`` lists them.
        schedule: the schedule, compute-only.
        costs: the costs of its stages, to say what a schedule takes that the framework has instead.
        names: the names of the modules of each stage, such as ``Partition.group`` returns.
        memory_limit: the memory of each rank, which a schedule should fit that the framework has instead.

    >>> from penstock.schedules.registry import build
    >>> found = settings_for("megatron", build("ZB-H1", ranks=4, microbatches=8))
    >>> found.schedule, found.planned, found.value
    (<Schedule 1F1B: 4 ranks, 4 stages, 8 microbatches, 64 actions>, 27.0, 33.0)
    """
    check_framework(framework)
    return FRAMEWORKS[framework](request_for(schedule, costs, names=names, memory_limit=memory_limit))


def check_framework(framework: str) -> None:
    """Raise an error if plans cannot be written for this framework.

    Raises:
        PlanError: its name is unknown; the error names the nearest one.
    """
    if framework not in FRAMEWORKS:
        near = get_close_matches(str(framework).lower(), FRAMEWORKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the frameworks are {', '.join(FRAMEWORKS)}"
        raise PlanError(f"unknown framework {framework!r}; {hint}", field="framework", value=framework)
