"""Says what a plan minimises, and measures it on a simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

import numpy as np

from penstock.errors import PlanError
from penstock.simulation.period import steady_period
from penstock.simulation.sampling import simulate_many

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.simulation.timeline import Timeline

ObjectiveName: TypeAlias = Literal["makespan", "span", "period"]
OBJECTIVES: Final[tuple[str, ...]] = get_args(ObjectiveName)

#: The number of runs with random delays.
SAMPLES: Final = 200


@dataclass(frozen=True, slots=True)
class Objective:
    """What a plan minimises.

    Attributes:
        name: ``makespan``, ``span``, or ``period``, the time per step without a barrier between steps.
        noise: how much the times of actions vary, as in ``simulate_many``; 0 if they do not.
        stragglers: how much the speeds of ranks vary.
        percentile: the percentile of the sampled runs that counts; by default their mean.
        seed: that of the samples.
    """

    name: str = "makespan"
    noise: float = 0.0
    stragglers: float | Sequence[float] = 0.0
    percentile: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise PlanError(
                f"unknown objective {self.name!r}; choose one of {', '.join(OBJECTIVES)}",
                field="objective",
                value=self.name,
            )
        if self.is_random and self.name == "period":
            raise PlanError("a period cannot be sampled; use objective='makespan' or 'span' with noise or stragglers",
                            field="objective", value=self.name)  # fmt: skip
        if self.percentile is not None and not self.is_random:
            raise PlanError(
                "percentile has no effect without noise or stragglers; pass e.g. noise=0.1 too",
                field="percentile",
                value=self.percentile,
            )
        given: object = self.percentile
        if given is not None and not (isinstance(given, (int, float)) and 0 <= given <= 100):
            raise PlanError(
                f"percentile must be between 0 and 100, got {self.percentile!r}",
                field="percentile",
                value=self.percentile,
            )

    @property
    def is_random(self) -> bool:
        """Whether times vary from run to run."""
        return bool(np.any(self.noise) or np.any(self.stragglers))

    def value(self, timeline: Timeline) -> float:
        """Return what this schedule costs."""
        if self.name == "period":
            return steady_period(timeline.schedule, timeline.costs)
        if not self.is_random:
            return timeline.makespan if self.name == "makespan" else timeline.span
        samples = simulate_many(
            timeline.schedule,
            timeline.costs,
            noise=self.noise,
            stragglers=self.stragglers,
            samples=SAMPLES,
            seed=self.seed,
        )
        times = samples.makespan if self.name == "makespan" else samples.span
        return float(times.mean() if self.percentile is None else np.percentile(times, self.percentile))

    def __str__(self) -> str:
        if not self.is_random:
            return self.name
        return (
            f"mean {self.name}" if self.percentile is None else f"{self.percentile:g}th percentile of the {self.name}"
        )
