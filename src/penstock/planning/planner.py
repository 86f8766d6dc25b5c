"""Searches several sites at once, and drops those that cannot win."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.planning.evaluator import Evaluator
from penstock.planning.exact_search import search_exactly
from penstock.planning.fuse import fuse
from penstock.planning.search import Search
from penstock.planning.sites import fitted, known_schedules
from penstock.planning.starts import splits_only_where_allowed
from penstock.simulation.bounds import Bound, Bounds, lower_bounds
from penstock.simulation.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.ir.schedule import Schedule
    from penstock.planning.evaluator import Trial
    from penstock.planning.objective import Objective
    from penstock.planning.orders import Order
    from penstock.planning.sites import Site
    from penstock.simulation.timeline import Timeline

#: The actions that the search runs with effort 1 if the problem is small; larger ones get more, but less per action.
WORK: Final = 20e6
_SMALL: Final = 512  # ranks x microbatches
_GROWTH: Final = 0.75

#: The share of the work that all sites get, before the rest goes to the best two.
FIRST_ROUND: Final = 0.4

#: The tolerance of limits and of comparisons between equal values, as a share.
ROUNDING: Final = 1e-9


class Progress(NamedTuple):
    """How far the search is.

    Attributes:
        doing: what it does, for people.
        best: the best value so far; infinite if there is none.
        bound: no schedule is better than this.
        seconds: how long it has taken.
    """

    doing: str
    best: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """How far the best is from the bound, as a share of it."""
        return gap_of(self.best, self.bound)


def _floor(value: float) -> Bound:
    words = "some rank must do as much in any partition, or one microbatch takes as long on its way through all layers"
    return Bound("partition", value, 0, words)


def gap_of(value: float, bound: float) -> float:
    """Return how far a value is above a bound, as a share of it."""
    if not math.isfinite(value):
        return math.inf
    return max(0.0, value / bound - 1) if bound > 0 else (0.0 if value <= 0 else math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A schedule that was simulated.

    Attributes:
        name: where it comes from.
        site: where it runs.
        timeline: its simulation.
        value: what the objective says.
        excess: by how much it exceeds the memory limit, and on which rank; None if it fits.
        may_split: whether it splits the backward only of stages that allow it.
    """

    name: str
    site: Site
    timeline: Timeline
    value: float
    excess: tuple[float, int] | None
    may_split: bool

    @property
    def quality(self) -> tuple[float, float, float]:
        """What decides between candidates that fit: the value, then the other time, then memory."""
        other = self.timeline.span + self.timeline.makespan
        return (
            float(f"{self.value:.9g}"),
            float(f"{other:.9g}"),
            float(f"{max(self.timeline.peak_memory, default=0.0):.9g}"),
        )


class Planner:
    """The search over sites.

    Attributes:
        objective: what is minimised.
        known: the schedules with a name, as far as they can be simulated.
        searches: the search of each site.
        exact_orders: what the exact solver found, and where.
        effort: how much to search.
        bounds: the lower bounds of each site.
    """

    def __init__(
        self,
        sites: Iterable[Site],
        objective: Objective,
        *,
        effort: float,
        seed: int,
        seconds: float | None = None,
        report: Callable[[Progress], object] | None = None,
    ) -> None:
        self.objective = objective
        self.sites = list(sites)
        self.known: list[Candidate] = []
        self.bounds: list[Bounds] = []
        self.searches: list[Search] = []
        self.exact_orders: list[tuple[Site, Order]] = []
        self.effort = effort
        self._seed = seed
        self._seconds = seconds
        self._report = report
        self._begun = perf_counter()

    @property
    def bound(self) -> float:
        """What no schedule goes below at any of the sites; 0 while none was looked at, and for percentiles.

        A makespan, and a period, which a span is never below, are convex in the times of actions, whose random factors
        have a mean of 1. So their means are at least what they are without them.
        """
        if self.objective.percentile is not None or len(self.bounds) < len(self.sites):
            return 0.0
        return min((bounds.best for bounds in self.proofs()), default=0.0)

    def proofs(self) -> list[Bounds]:
        """Return what bounds every choice at each site: of recomputation, and of the partition."""
        return [
            bounds if site.floor is None else Bounds(self.objective.name, (_floor(site.floor),))
            for site, bounds in zip(self.sites, self.bounds, strict=False)
        ]

    @property
    def best(self) -> float:
        """The best nominal value that any search has found."""
        return min((search.evaluator.primary(search.best) for search in self.searches if search.best), default=math.inf)

    def start(self) -> None:
        """Try every start at every site."""
        for site in self.sites:
            self._say(f"trying known schedules with {site.name}")
            bounds = lower_bounds(site.relaxed, self.objective.name)
            evaluator = Evaluator(site.problem, self.objective.name, bounds.best)
            search = Search(evaluator, seed=self._seed)
            self.bounds.append(bounds)
            self.searches.append(search)
            if not math.isfinite(bounds.best):
                continue
            schedules = list(known_schedules(site.problem))
            schedules += fitted(schedules, site.problem)
            self.known += [self.candidate(str(each.metadata["name"]), site, each) for each in schedules]
            search.start(schedules)

    def search(self) -> None:
        """Improve the best orders: first at all sites, then at the two best; small ones exactly."""
        work = self.effort * sum(self._work(site) for site in self.sites) / max(1, len(self.sites))
        self._improve(list(range(len(self.sites))), FIRST_ROUND * work)
        contenders = [number for number, search in enumerate(self.searches) if search.best]
        contenders.sort(key=lambda number: self.searches[number].evaluator.primary(self.searches[number].best))  # type: ignore[arg-type]  # filtered
        self._improve(contenders[:2], (1 - FIRST_ROUND) * work)
        search_exactly(self, self._seconds, self._seed, self._say)

    def _improve(self, numbers: list[int], work: float) -> None:
        """Share the work between the sites that can still win, in portions between which they are compared again."""
        portions = max(1, round(self.effort))
        for _ in range(portions):
            open_ones = [number for number in numbers if self.can_win(number)]
            for number in open_ones:
                self._say(f"searching with {self.sites[number].name}")
                self.searches[number].improve(work / portions / len(open_ones))

    def can_win(self, number: int) -> bool:
        """Return whether a site could still have the best schedule."""
        search = self.searches[number]
        if search.best is None or search.is_done:
            return False
        return self.bounds[number].best < self.best * (1 - ROUNDING)

    def _work(self, site: Site) -> float:
        size = site.problem.ranks * site.problem.microbatches
        return float(WORK * max(1.0, size / _SMALL) ** _GROWTH)

    def candidates(self) -> list[Candidate]:
        """Return the known schedules and the best found ones, simulated."""
        found = list(self.known)
        for site, search in zip(self.sites, self.searches, strict=False):  # fewer if interrupted
            trials = search.trials if self._needs_all(site) else search.trials[:1]
            found += [self.found(site, search.evaluator, trial) for trial in trials]
        for site, order in self.exact_orders:
            found.append(self.candidate("exact search", site, order.to_schedule(site.problem, "planned")))
        return found

    def _needs_all(self, site: Site) -> bool:
        """Return whether a search compares something else than the plan does."""
        return (
            self.objective.is_random or self.objective.name == "period" or bool(np.any(site.problem.costs.edge_memory))
        )

    def found(self, site: Site, evaluator: Evaluator, trial: Trial) -> Candidate:
        """Return a trial as a candidate, with whole backwards where they do no harm."""
        schedule = fuse(evaluator, trial).order.to_schedule(site.problem, "planned")
        return self.candidate(f"search ({trial.origin})", site, schedule)

    def candidate(self, name: str, site: Site, schedule: Schedule) -> Candidate:
        """Simulate a schedule."""
        timeline = simulate(schedule, site.problem.costs)
        limit = site.problem.memory_limit
        over = np.array(timeline.peak_memory) - limit
        rank = int(over.argmax())
        fits = over[rank] <= ROUNDING * limit[rank]
        excess = None if fits else (float(over[rank]), rank)
        allowed = splits_only_where_allowed(site.problem, schedule)
        return Candidate(name, site, timeline, self.objective.value(timeline), excess, allowed)

    def _say(self, doing: str) -> None:
        if self._report is not None:
            self._report(Progress(doing, self.best, self.bound, perf_counter() - self._begun))
