"""One schedule, many costs: how sure the prediction is when actions take longer by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import CostsError
from penstock.graph.timing import starts
from penstock.ir.numbers import whole_number
from penstock.simulation.costs import Costs
from penstock.simulation.simulate import prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.models import CommModel
    from penstock.ir.schedule import Schedule
    from penstock.simulation.flow import Flow

    Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Samples:
    """What many runs take.

    Attributes:
        makespan: of every sample, from the first start to the last end over all ranks.
        span: of every sample, the longest that a rank takes from its own first start to its own last end.
    """

    makespan: Floats
    span: Floats

    def __len__(self) -> int:
        return len(self.makespan)

    def percentile(self, percent: float) -> float:
        """The makespan that so many percent of the samples do not exceed."""
        if not 0 <= percent <= 100:
            raise CostsError(f"a percentile is from 0 to 100, not {percent!r}", field="percent", value=percent)
        return float(np.percentile(self.makespan, percent))

    def __repr__(self) -> str:
        shown = ", ".join(f"{percent} % within {self.percentile(percent):g}" for percent in (5, 50, 95))
        return f"<Samples: {len(self)} makespans, {shown}>"


def simulate_many(
    schedule: Schedule,
    costs: Costs | Sequence[Costs] | None = None,
    *,
    model: CommModel | None = None,
    samples: int = 1000,
    noise: float = 0.0,
    stragglers: float | Sequence[float] = 0.0,
    seed: int = 0,
) -> Samples:
    """Simulate a schedule with each of several costs, or many times with one that varies by chance.

    Every action takes its time times a factor drawn for itself, times one drawn for its rank. The factors are lognormal
    with a mean of 1: a spread of 0.1 is about ten percent more or less. Equal seeds give equal samples.

    >>> from penstock.schedules.registry import build
    >>> schedule = build("1F1B", ranks=4, microbatches=8)
    >>> simulate_many(schedule, [Costs(), Costs(forward=2)]).makespan
    array([33., 44.])
    >>> simulate_many(schedule, noise=0.1, samples=200).percentile(50) > 33
    True

    Args:
        schedule: compute-only or lowered.
        costs: one, to be varied; or several, each simulated once as it is.
        model: how communication behaves, as for ``simulate``.
        samples: how many samples to draw, if ``costs`` is one.
        noise: the spread of the factor of every action.
        stragglers: the spread of the factor of every rank; one for all, or one per rank.
        seed: where the chance begins.
    """
    if isinstance(costs, Costs) or costs is None:
        flow, one = prepared(schedule, costs, model)
        count = whole_number("samples", samples, least=1)
        drawn = _varied(flow, one, count, _spread("noise", noise), _ranks(flow, stragglers), seed)
    else:
        if not costs or not all(isinstance(each, Costs) for each in costs):
            raise CostsError(f"give Costs, or a list of them, not {costs!r}")
        flow, _ = prepared(schedule, costs[0], model)
        drawn = ((each, flow.durations(each)) for each in costs)
    results = [_extent(flow, each, duration) for each, duration in drawn]
    makespan, span = np.array(results).T
    return Samples(makespan, span)


def _varied(
    flow: Flow, costs: Costs, samples: int, noise: float, stragglers: Floats, seed: int
) -> Iterator[tuple[Costs, Floats]]:
    duration = flow.durations(costs)
    chance = np.random.default_rng(seed)
    runs = flow.blocking
    rank = flow.rank[runs]
    for _ in range(samples):
        varied = duration.copy()
        varied[runs] *= _factors(chance, np.full(len(runs), noise)) * _factors(chance, stragglers)[rank]
        yield costs, varied


def _factors(chance: np.random.Generator, spread: Floats) -> Floats:
    """Lognormal factors with a mean of 1 and these spreads."""
    if not spread.any():
        return np.ones(len(spread))
    variance = np.log1p(spread**2)
    return np.asarray(np.exp(chance.standard_normal(len(spread)) * np.sqrt(variance) - variance / 2))


def _extent(flow: Flow, costs: Costs, duration: Floats) -> tuple[float, float]:
    """Makespan and span."""
    start, _ = starts(flow.order, duration, flow.delays(costs), flow.releases(costs))
    runs = flow.timed(costs, duration)
    rank = flow.rank[runs]
    begins = np.searchsorted(rank, np.unique(rank))
    first = np.minimum.reduceat(start[runs], begins)
    last = np.maximum.reduceat(start[runs] + duration[runs], begins)
    return float(last.max() - first.min()), float((last - first).max())


def _spread(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < np.inf:
        raise CostsError(f"{field} must be a number, at least 0, not {value!r}", field=field, value=value)
    return float(value)


def _ranks(flow: Flow, stragglers: float | Sequence[float]) -> Floats:
    if not isinstance(stragglers, Sequence):
        return np.full(flow.ranks, _spread("stragglers", stragglers))
    if len(stragglers) != flow.ranks:
        raise CostsError(
            f"stragglers has {len(stragglers)} numbers, but there are {flow.ranks} ranks: give one for each",
            field="stragglers",
            value=stragglers,
        )
    return np.array([_spread("stragglers", spread) for spread in stragglers])
