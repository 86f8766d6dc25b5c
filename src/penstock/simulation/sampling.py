"""Simulates a schedule with many costs, to see how much the prediction varies with random delays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import CostsError
from penstock.graph.start_times import start_times
from penstock.ir.numbers import whole_number
from penstock.simulation.costs import Costs, checked_number
from penstock.simulation.extent import Extent, extent_of
from penstock.simulation.simulate import prepare
from penstock.simulation.step_graph import DATA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.graph.comm_model import CommModel
    from penstock.ir.schedule import Schedule
    from penstock.simulation.step_graph import StepGraph

    Floats = NDArray[np.float64]


MOST_SAMPLES: Final = 10_000_000
_LARGEST_SPREAD: Final = 10.0


@dataclass(frozen=True, eq=False)
class Samples:
    """The times of many runs.

    Attributes:
        makespan: for every sample, from the first start to the last end over all ranks.
        span: for every sample, the longest time that a rank takes from its own first start to its own last end.
    """

    makespan: Floats
    span: Floats

    def __len__(self) -> int:
        return len(self.makespan)

    def percentile(self, percent: float) -> float:
        """Return the makespan that ``percent`` percent of the samples do not exceed."""
        given: object = percent
        if not isinstance(given, (int, float)) or not 0 <= given <= 100:
            raise CostsError(f"percent must be between 0 and 100, got {percent!r}", field="percent", value=percent)
        return float(np.percentile(self.makespan, percent))

    def __repr__(self) -> str:
        shown = ", ".join(f"{percent} % within {self.percentile(percent):g}" for percent in (5, 50, 95))
        return f"<Samples: {len(self)} makespans, {shown}>"


def simulate_many(
    schedule: Schedule,
    costs: Costs | Sequence[Costs] | None = None,
    *,
    model: CommModel | None = None,
    steps: int = 1,
    synchronise: bool = True,
    samples: int = 1000,
    noise: float = 0.0,
    stragglers: float | Sequence[float] = 0.0,
    seed: int = 0,
    progress: Callable[[], object] | None = None,
) -> Samples:
    """Simulate a schedule with each of several costs, or many times with costs that vary randomly.

    The time of every action and transfer is multiplied by a random factor of its own, and the time of every action that
    a rank runs itself also by a factor of the rank. The factors are lognormal with a mean of 1: a spread of 0.1 is
    about ten percent more or less. Equal seeds give equal samples.

    >>> from penstock.schedules.registry import build
    >>> schedule = build("1F1B", ranks=4, microbatches=8)
    >>> simulate_many(schedule, [Costs(), Costs(forward=2)]).makespan
    array([33., 44.])
    >>> simulate_many(schedule, noise=0.1, samples=200).percentile(50) > 33
    True

    Args:
        schedule: compute-only or lowered.
        costs: one, to be varied; or several, each simulated once without variation.
        model: how communication behaves, as for ``simulate``.
        steps: the number of steps in each sample, as for ``simulate``.
        synchronise: whether ranks wait for each other between steps.
        samples: the number of samples to draw, if ``costs`` is a single one.
        noise: the relative standard deviation of the time of every action.
        stragglers: the relative standard deviation of the speed of every rank; one for all, or one per rank.
        seed: the seed of the random numbers.
        progress: called after every sample.
    """
    if isinstance(costs, Costs) or costs is None:
        graph, one = prepare(schedule, costs, model, steps, synchronise=synchronise)
        count = whole_number("samples", samples, least=1, most=MOST_SAMPLES)
        chance = np.random.default_rng(whole_number("seed", seed))
        runs = _varied(graph, one, count, _spread("noise", noise), _ranks(graph, stragglers), chance)
    else:
        given = _listed(costs)
        if np.any(noise) or np.any(stragglers):
            raise CostsError(
                "noise and stragglers need a single Costs; a list of them is simulated without variation", field="noise"
            )
        graph, _ = prepare(schedule, given[0], model, steps, synchronise=synchronise)
        for each in given:
            each.check(schedule.stages, len(schedule.edges))
        runs = ((each, graph.durations(each), graph.delays(each)) for each in given)
    extents = []
    for run in runs:
        extents.append(_run(graph, *run))
        if progress is not None:
            progress()
    return Samples(np.array([e.makespan for e in extents]), np.array([e.span for e in extents]))


def _listed(costs: object) -> tuple[Costs, ...]:
    given = tuple(costs) if isinstance(costs, Iterable) else ()
    if not given or not all(isinstance(each, Costs) for each in given):
        raise CostsError(f"costs must be Costs or a list of them, got {costs!r}")
    return given


def _run(graph: StepGraph, costs: Costs, duration: Floats, delay: Floats) -> Extent:
    start, _ = start_times(graph.order, duration, delay, graph.release_times(costs))
    return extent_of(graph, costs, start, duration)


def _varied(
    graph: StepGraph, costs: Costs, samples: int, noise: float, stragglers: Floats, chance: np.random.Generator
) -> Iterator[tuple[Costs, Floats, Floats]]:
    duration, delay = graph.durations(costs), graph.delays(costs)
    between = np.flatnonzero(graph.reason == DATA)  # implied transfers
    of_action, of_transfer = np.full(graph.cells, noise), np.full(len(between), noise)
    rank = graph.rank[graph.blocking]
    for _ in range(samples):
        varied, delayed = duration.copy(), delay.copy()
        varied[: graph.cells] *= _factors(chance, of_action)
        varied[graph.blocking] *= _factors(chance, stragglers)[rank]
        delayed[between] *= _factors(chance, of_transfer)
        yield costs, varied, delayed


def _factors(chance: np.random.Generator, spread: Floats) -> Floats:
    """Draw lognormal factors with a mean of 1 and these spreads."""
    if not spread.any():
        return np.ones(len(spread))
    variance = np.log1p(spread**2)
    return np.asarray(np.exp(chance.standard_normal(len(spread)) * np.sqrt(variance) - variance / 2))


def _spread(field: str, value: object) -> float:
    """Check a spread: beyond a few hundred percent, a lognormal factor is meaningless."""
    number = checked_number(field, field, value)
    if number > _LARGEST_SPREAD:
        raise CostsError(f"{field} must be at most {_LARGEST_SPREAD:g}, got {value!r}", field=field, value=value)
    return number


def _ranks(graph: StepGraph, stragglers: object) -> Floats:
    if isinstance(stragglers, str) or not isinstance(stragglers, (Sequence, np.ndarray)):
        return np.full(graph.ranks, _spread("stragglers", stragglers))
    if len(stragglers) != graph.ranks:
        raise CostsError(
            f"stragglers has {len(stragglers)} numbers, but there are {graph.ranks} ranks; pass one for each",
            field="stragglers",
            value=stragglers,
        )
    return np.array([_spread("stragglers", spread) for spread in stragglers])
