"""Cases on real processes: as many as there are in one call, since a call costs more than a case."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from differential import dropin, native
from differential.cases import Case, draw
from differential.forms import NATIVE
from differential.observing import Raised, Result
from differential.outcomes import known_warnings
from runtime.workers import WorkerError, Workers


def run_batch(rank: int, ranks: int, seeds: list[int], *, group: Any) -> list[Result]:
    """The results of this rank, up to the first case that it fails at.

    When it returns, its group is destroyed, and so the others learn that there has been a failure.
    """
    results: list[Result] = []
    for seed in seeds:
        print("seed", seed, flush=True)  # noqa: T201 - in the log, which is shown if there is no end
        case, result = draw(seed), Result()
        results.append(result)
        run = native.run_process if case.door == NATIVE else dropin.run_process
        with suppress(Exception), known_warnings(), result.note_errors():
            run(case, rank, group, result)
        if result.raised is not None:
            break
    return results


def run_cases(workers: Workers, cases: Iterable[Case]) -> dict[int, list[Result]]:
    """The results of each case by its seed, a result for each of its ranks."""
    found: dict[int, list[Result]] = {}
    for ranks in (1, 2, 3):
        seeds = [case.seed for case in cases if case.ranks == ranks]
        while seeds:
            found |= _run_some(workers, seeds, ranks)
            seeds = [seed for seed in seeds if seed not in found]
    return found


def _run_some(workers: Workers, seeds: list[int], ranks: int) -> dict[int, list[Result]]:
    """The results of the first cases: up to one that fails."""
    try:
        rows = workers.run(run_batch, seeds, ranks=ranks, fresh=True, limit=30 + len(seeds))
    except WorkerError as error:
        reached = [int(number) for number in re.findall(r"^seed (\d+)", str(error), re.MULTILINE)]
        stuck = next((seed for seed in seeds if reached.count(seed) < ranks), seeds[0])
        before = seeds.index(stuck)
        stuck = seeds[max(0, before - 1)] if reached.count(stuck) == 0 else stuck
        return {stuck: [Result(raised=Raised("WorkerError", "no end", str(error)))]}
    done = min(len(row) for row in rows)
    failed = [place for place in range(done) if any(row[place].raised for row in rows)]
    end = failed[0] + 1 if failed else done
    return {seed: [row[place] for row in rows] for place, seed in enumerate(seeds[:end])}
