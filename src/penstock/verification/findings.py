"""What is wrong with a schedule, in facts and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.graph.action_table import Leaves
    from penstock.ir.actions import Action

#: More than this tells nobody more.
MOST_FINDINGS: Final = 48


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: what sort of mistake it is, e.g. ``"missing"`` or ``"deadlock"``.
        rank: the rank that it is on, where there is one.
        step: the step in the rank's row, counted from 0; None for what is not there.
        action: the action that is wrong or missing.
        message: what is wrong.
        fix: what to do about it.
        marks: every (rank, step) that has to do with it.
    """

    kind: str
    rank: int | None
    step: int | None
    action: Action | None
    message: str
    fix: str
    marks: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        place = [] if self.rank is None else [f"rank {self.rank}"]
        place += [] if self.step is None else [f"step {self.step}"]
        told = f"{', '.join(place)}: {self.message}" if place else self.message
        return f"{told}; {self.fix}" if self.fix else told


class Problem(NamedTuple):
    """Mistakes of one kind: where they are, and how to put one into words when it is to be shown.

    Attributes:
        kind: as in ``Finding``.
        places: the places in the leaves; for what is missing, whatever ``tell`` understands.
        tell: makes the finding for one of the places.
    """

    kind: str
    places: NDArray[np.int64]
    tell: Callable[[int], Finding]


def at(leaves: Leaves, kind: str, message: str, fix: str, *others: int) -> Callable[[int], Finding]:
    """How to tell of an action that is there: ``{}`` in the words stands for it; ``others`` are marked with it."""

    def tell(place: int) -> Finding:
        action = action_at(leaves, place)
        rank, step = position(leaves, place)
        marks = ((rank, step), *(position(leaves, other) for other in others))
        return Finding(kind, rank, step, action, message.format(action), fix.format(action), marks)

    return tell


def action_at(leaves: Leaves, place: int) -> Action:
    """The action at this place of the leaves; a sub-action of an overlap is itself."""
    found = packed.unpack_cells(leaves.codes[place : place + 1] & ~packed.JOINED)[0]
    assert found is not None
    return found


def position(leaves: Leaves, place: int) -> tuple[int, int]:
    """The rank and the step of this place."""
    rank = int(leaves.rank[place])
    return rank, int(leaves.cell[place] - leaves.first_cell[rank])


def found(checks: Iterable[Iterable[Problem]]) -> list[Problem]:
    """What the checks found: the problems that are somewhere."""
    return [problem for check in checks for problem in check if len(problem.places)]


def told(problems: Sequence[Problem]) -> list[Finding]:
    """The findings, as many as anybody reads, and a last one that counts the rest by kind."""
    if not problems:
        return []
    share = max(1, MOST_FINDINGS // len(problems))
    findings = [problem.tell(int(place)) for problem in problems for place in problem.places[:share]]
    findings = findings[:MOST_FINDINGS]
    kinds: Counter[str] = Counter()
    for problem in problems:
        kinds[problem.kind] += len(problem.places)
    if (rest := kinds.total() - len(findings)) > 0:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        findings.append(Finding("more", None, None, None, f"and {rest} more (in all: {counts})", ""))
    return findings
