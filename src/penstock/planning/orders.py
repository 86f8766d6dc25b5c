"""Defines what the search changes: the order in which every rank runs forwards and backwards, as small integers.

The microbatches of a stage are identical, so first in, first out loses nothing: the i-th forward of a stage is that of
microbatch i. An order therefore needs no microbatch numbers. Every action is a token, 4 * stage + kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.simulation.problem import Problem

    Ints = NDArray[np.int64]
    Tokens = NDArray[np.int32]

#: The kinds of a token.
F, I, W, B = range(4)  # noqa: E741 - the letters of the schedule language
KINDS: Final = 4

_TYPES: Final = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD)
_KIND_OF: Final = {packed.TYPE_NUMBER[kind]: number for number, kind in enumerate(_TYPES)}


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """What every rank runs, in order.

    Attributes:
        first: where the tokens of each rank begin, and finally where they end.
        tokens: 4 * stage + kind for each action, rank after rank.
    """

    first: Ints
    tokens: Tokens

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | Tokens]) -> Order:
        """Join the tokens of each rank."""
        arrays = [np.asarray(row, np.int32) for row in rows]
        first = np.append(0, np.cumsum([len(row) for row in arrays])).astype(np.int64)
        return cls(first, np.concatenate(arrays) if arrays else np.zeros(0, np.int32))

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> Order | None:
        """Return the order of a compute-only schedule; None if some stage does not run its microbatches in order.

        The parts of an overlap follow each other.

        >>> from penstock.schedules.one_f_one_b import one_f_one_b
        >>> [row.tolist() for row in Order.from_schedule(one_f_one_b(ranks=2, microbatches=2)).rows]
        [[0, 0, 3, 3], [4, 7, 4, 7]]
        """
        rows = []
        for rank in range(schedule.ranks):
            codes = schedule.codes_of(rank)
            codes = codes[codes != packed.IDLE]
            kinds = np.array([_KIND_OF[each] for each in packed.types(codes).tolist()], np.int64)
            row = packed.stages(codes) * KINDS + kinds
            if not np.array_equal(packed.microbatches(codes), microbatches_of(row)):
                return None
            rows.append(row)
        return cls.from_rows(rows)

    @property
    def rows(self) -> list[Tokens]:
        """The tokens of each rank."""
        return [self.tokens[begin:end] for begin, end in pairwise(self.first.tolist())]

    def without_weights(self) -> Order:
        """Return the order of forwards and backwards alone: where W run follows from patience and memory."""
        return Order.from_rows(row[row % KINDS != W] for row in self.rows)

    def to_schedule(self, problem: Problem, name: str, **metadata: Any) -> Schedule:
        """Return the schedule that runs in this order."""
        kinds = np.array([packed.TYPE_NUMBER[kind] for kind in _TYPES], np.int64)
        rows = []
        for row in self.rows:
            stage, kind = np.divmod(row.astype(np.int64), KINDS)
            rows.append(packed.with_kinds(packed.pack(stage, FORWARD, microbatches_of(row)), kinds[kind]))
        return Schedule.from_codes(
            rows,
            placement=problem.placement,
            microbatches=problem.microbatches,
            metadata={"name": name, **metadata},
            edges=None if problem.is_chain else problem.edges,
        )


def microbatches_of(row: NDArray[np.signedinteger[Any]]) -> Ints:
    """Return the microbatch of each token of a rank: I and B count together, and W follow the I of their stage."""
    kind = row % KINDS
    count = occurrences(np.where(kind == B, row - B + I, row))
    owed, paid = np.flatnonzero(kind == I), np.flatnonzero(kind == W)
    # Sorted by stage, and in order within each stage, the j-th of one is that of the j-th of the other.
    owed, paid = (each[np.argsort(row[each], kind="stable")] for each in (owed, paid))
    if len(owed) == len(paid):
        count[paid] = count[owed]
    return count


def occurrences(values: NDArray[np.signedinteger[Any]]) -> Ints:
    """Return how often the same value occurs before each place.

    >>> occurrences(np.array([7, 3, 7, 7, 3])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))[: len(values)]
    lengths = np.diff(np.append(begins, len(values)))
    count = np.empty(len(values), np.int64)
    count[order] = np.arange(len(values)) - np.repeat(begins, lengths)
    return count
