"""Searches for the best order of one problem: starts, then annealing by rounds that halve the number of contenders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.planning.starts import (
    ListStart,
    adapted_start,
    best_of,
    block_orders,
    filled,
    known_trials,
    list_starts,
    ordered_start,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.ir.schedule import Schedule
    from penstock.planning.evaluator import Evaluator, Trial
    from penstock.planning.orders import Order

#: How many trials of each kind are improved, and how many in all.
OF_A_KIND: Final = 2
CONTENDERS: Final = 8
#: The shares of the work for tuning list scheduling, and for moving W in the end; the rest moves F and backwards.
TUNING, POLISHING = 0.2, 0.2
#: The starting temperatures, as a share of the work of the busiest rank.
TUNING_HEAT: Final = 0.002
HEATS: Final = (0.001, 0.0003)


class Search:
    """The search for one problem; it can be continued with more work.

    Attributes:
        evaluator: what runs the orders.
        trials: the best ones so far, best first.
    """

    def __init__(self, evaluator: Evaluator, *, seed: int = 0) -> None:
        self.evaluator = evaluator
        self.trials: list[Trial] = []
        self._seed = 1000 * seed
        self._lists: list[tuple[Trial, ListStart, bool]] = []
        problem = evaluator.problem
        self._ideal = float(problem.work.max(initial=0.0))

    @property
    def best(self) -> Trial | None:
        """The best trial so far."""
        return self.trials[0] if self.trials else None

    @property
    def is_done(self) -> bool:
        """Whether the best trial is proved optimal."""
        return self.best is not None and self.evaluator.is_optimal(self.best)

    def start(self, known: Iterable[Schedule] = ()) -> None:
        """Try every start once: known schedules of this placement, building blocks, and list scheduling."""
        evaluator, problem = self.evaluator, self.evaluator.problem
        found: list[list[Trial]] = [[], [], [], []]
        starts = list(list_starts(problem))
        for schedule in known:
            found[0] += known_trials(evaluator, schedule)
            starts.append(adapted_start(problem, schedule))
        for order in block_orders(problem):
            starts.append(ordered_start(problem, order))
            found[1] += filled(evaluator, "building block", evaluator.split(order))
        for start in starts:
            for reserve in (True, False) if problem.stages > problem.ranks else (True,):
                trial = evaluator.list(start.origin, start.urgency, start.offset, reserve=reserve)
                if trial is not None:
                    self._lists.append((trial, start, reserve))
                    found[2 if start.unit == 1.0 else 3].append(trial)
        self._lists.sort(key=lambda entry: evaluator.quality(entry[0]))
        chosen = [trial for kind in found for trial in best_of(evaluator, kind, OF_A_KIND)]
        self._keep(chosen)

    def add(self, origin: str, order: Order) -> None:
        """Keep an order that was found elsewhere, if it is among the best."""
        trial = self.evaluator.replay(origin, order)
        if trial is not None:
            self._keep([trial])

    def improve(self, work: float) -> None:
        """Improve the best trials, with about this many actions run."""
        if self.is_done or not self.trials:
            return
        self._tune(TUNING * work)
        contenders = self.trials[:CONTENDERS]
        rounds = max(1, len(contenders).bit_length())
        for number in range(rounds):
            share = (1 - TUNING - POLISHING) * work / rounds / len(contenders)
            contenders = [
                self._anneal(trial, heat=HEATS[(number + place) % 2], work=share)
                for place, trial in enumerate(contenders)
            ]
            self._keep(contenders)
            if self.is_done:
                return
            contenders = best_of(self.evaluator, contenders, max(1, len(contenders) // 2))
        self._polish(POLISHING * work)

    def _tune(self, work: float) -> None:
        evaluator, chosen = self.evaluator, self._lists[:2]
        steps = int(work / max(1, len(chosen)) / (2 * evaluator.length))
        if steps < 1:
            return
        tuned = []
        for trial, start, reserve in chosen:
            self._seed += 1
            tuned.append(
                evaluator.tune(
                    trial.origin,
                    start.urgency,
                    start.offset,
                    reserve=reserve,
                    unit=start.unit,
                    steps=steps,
                    hot=TUNING_HEAT * self._ideal,
                    seed=self._seed,
                )
            )
        self._keep(trial for trial in tuned if trial is not None)

    def _anneal(self, trial: Trial, *, heat: float, work: float) -> Trial:
        steps = int(work / self.evaluator.length)
        if steps < 1:
            return trial
        self._seed += 1
        return self.evaluator.anneal(trial, steps=steps, hot=heat * self._ideal, seed=self._seed)

    def _polish(self, work: float) -> None:
        best = self.trials[0]
        steps = int(work / len(best.order.tokens))
        if steps >= 1:
            self._seed += 1
            self._keep([self.evaluator.anneal_all(best, steps=steps, hot=HEATS[1] * self._ideal, seed=self._seed)])

    def _keep(self, trials: Iterable[Trial] | Sequence[Trial]) -> None:
        self.trials = best_of(self.evaluator, [*self.trials, *trials], 2 * CONTENDERS)
