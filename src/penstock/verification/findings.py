"""Describes what is wrong with a schedule, as data and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.graph.action_table import ActionTable
    from penstock.ir.actions import Action

#: More findings would not be read.
MOST_FINDINGS: Final = 48


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake in a schedule.

    Attributes:
        kind: the kind of mistake, e.g. ``"missing"`` or ``"deadlock"``.
        rank: the rank that it is on, if it is a single one.
        step: the step in the row of the rank, counted from 0; None for a missing action.
        action: the action that is wrong or missing.
        message: what is wrong.
        fix: what to do about it.
        marks: every (rank, step) that is involved.
    """

    kind: str
    rank: int | None
    step: int | None
    action: Action | None
    message: str
    fix: str
    marks: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        where += [] if self.step is None else [f"step {self.step}"]
        text = f"{', '.join(where)}: {self.message}" if where else self.message
        return f"{text}; {self.fix}" if self.fix else text


class Problem(NamedTuple):
    """All mistakes of one kind, described only when they are shown.

    Attributes:
        kind: as in ``Finding``.
        positions: the positions of the actions, or other numbers that ``describe`` takes.
        describe: returns the finding for one of the positions.
    """

    kind: str
    positions: NDArray[np.int64]
    describe: Callable[[int], Finding]


def describe_at(actions: ActionTable, kind: str, message: str, fix: str, *others: int) -> Callable[[int], Finding]:
    """Return a function that describes an action; ``{}`` in the texts stands for it, and ``others`` are marked too."""

    def describe(position: int) -> Finding:
        action = action_at(actions, position)
        rank, step = rank_and_step(actions, position)
        marks = ((rank, step), *(rank_and_step(actions, other) for other in others))
        return Finding(kind, rank, step, action, message.format(action), fix.format(action), marks)

    return describe


def action_at(actions: ActionTable, position: int) -> Action:
    """Return the action at this position; a sub-action of an overlap by itself."""
    found = packed.unpack_cells(actions.codes[position : position + 1] & ~packed.JOINED)[0]
    assert found is not None
    return found


def rank_and_step(actions: ActionTable, position: int) -> tuple[int, int]:
    """Return the rank and the step of this position."""
    rank = int(actions.rank[position])
    return rank, int(actions.cell[position] - actions.first_cell[rank])


def collect(checks: Iterable[Iterable[Problem]]) -> list[Problem]:
    """Run the checks, and return the problems that occur."""
    return [problem for check in checks for problem in check if len(problem.positions)]


def report(problems: Sequence[Problem]) -> list[Finding]:
    """Return the first findings of each problem, and a last one that counts the rest by kind."""
    if not problems:
        return []
    share = max(1, MOST_FINDINGS // len(problems))
    findings = [problem.describe(int(position)) for problem in problems for position in problem.positions[:share]]
    findings = findings[:MOST_FINDINGS]
    kinds: Counter[str] = Counter()
    for problem in problems:
        kinds[problem.kind] += len(problem.positions)
    if (rest := kinds.total() - len(findings)) > 0:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        findings.append(Finding("more", None, None, None, f"and {rest} more (in all: {counts})", ""))
    return findings
