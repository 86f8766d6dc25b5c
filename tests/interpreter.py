"""An independent slow oracle: runs a compute schedule literally, with times, by the rules of pipeline training.

It shares no code with penstock: it takes the actions as text, and knows on its own what a forward, a backward and its
halves wait for. Exact: times are fractions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_LEAF = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class Costs:
    """Of one stage and one microbatch; a transfer between two ranks takes ``transfer``."""

    forward: Fraction | int = 1
    input: Fraction | int = 1
    weight: Fraction | int = 1
    transfer: Fraction | int = 0


@dataclass(frozen=True)
class Run:
    makespan: Fraction | int
    span: Fraction | int
    #: Activations held at most by each rank, in stages x microbatches; each is held until its weight gradient.
    peaks: list[int]
    #: The start of every cell of every rank; None for an idle one.
    starts: list[list[Fraction | int | None]]


class StuckError(Exception):
    """No rank can go on."""


def leaves(cell: str) -> list[tuple[int, str, int]]:
    return [(int(stage), kind, int(microbatch)) for stage, kind, microbatch in _LEAF.findall(cell)]


def run(rows: list[list[str]], stages: int, costs: Costs = Costs()) -> Run:  # noqa: B008 - a value
    """Rows of cells as text, ``""`` for an idle step. Ranks take turns until all are done or none can move."""
    rank_of = {stage: rank for rank, row in enumerate(rows) for cell in row for stage, _, _ in leaves(cell)}
    seconds = {"F": costs.forward, "I": costs.input, "W": costs.weight, "B": costs.input + costs.weight}
    ended: dict[tuple[str, int, int], Fraction | int] = {}
    clock: list[Fraction | int] = [0] * len(rows)
    starts: list[list[Fraction | int | None]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while len(starts[rank]) < len(row):
                cell = leaves(row[len(starts[rank])])
                inputs = [event for leaf in cell for event in _waits_for(*leaf, stages)]
                if not all(event in ended for event in inputs):
                    break
                arrivals = [ended[e] + (costs.transfer if rank_of[e[1]] != rank else 0) for e in inputs]
                start = max([clock[rank], *arrivals])
                clock[rank] = start + sum(seconds[kind] for _, kind, _ in cell)
                for stage, kind, microbatch in cell:
                    ended[("F" if kind == "F" else "W" if kind == "W" else "G", stage, microbatch)] = clock[rank]
                starts[rank].append(start if cell else None)
                moved = True
    for rank, row in enumerate(rows):
        if len(starts[rank]) < len(row):
            raise StuckError(f"rank {rank} at {row[len(starts[rank])]}")
    return _summary(rows, starts, clock)


def _waits_for(stage: int, kind: str, microbatch: int, stages: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("G", stage, microbatch)]
    above = [("G", stage + 1, microbatch)] if stage + 1 < stages else []
    return [("F", stage, microbatch), *above]


def _summary(rows: list[list[str]], starts: list[list[Fraction | int | None]], clock: list[Fraction | int]) -> Run:
    firsts = [next(start for start in row if start is not None) for row in starts]
    peaks = []
    for row in rows:
        held = peak = 0
        for cell in row:
            for _, kind, _ in leaves(cell):
                held += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
                peak = max(peak, held)
        peaks.append(peak)
    spans = [end - first for first, end in zip(firsts, clock, strict=True)]
    return Run(max(clock) - min(firsts), max(spans), peaks, starts)
