"""The player for schedules that are phases of a repeated pattern, on ranks with two stages."""

from __future__ import annotations

from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.ir.packed import Codes

#: The first action of each note on stage 0, and whether the note is of the second stage.
_FIRST: Final = {
    kind + stage: (int(packed.pack(0, ComputationType(kind), 0)), int(stage)) for kind in "FBIW" for stage in "01"
}
#: What a note is counted with: a whole backward and its first half are one sequence of microbatches.
_SEQUENCE: Final = {"I0": "B0", "I1": "B1"}
#: The weight gradients, and which input gradients owe them.
_OWED_BY: Final = {"W0": ("I0",), "W1": ("I1",), "W": ("I0", "I1")}


class _Run(NamedTuple):
    """A note of a phase: once in every repetition, at evenly spaced places of the row."""

    note: str
    is_joined: bool
    times: int
    place: int
    stride: int
    #: The number in its sequence: the first microbatch, or of a weight gradient how many came before.
    number: int

    @property
    def facts(self) -> tuple[int, ...]:
        """All that it takes to play it, as numbers."""
        return (*_FIRST[self.note], self.times, self.place, self.stride, self.number, self.is_joined)


class _Debt(NamedTuple):
    """The weight gradients that a run of input gradients owes: their numbers, evenly spaced."""

    inputs: _Run
    number: int
    stride: int

    def paid_by(self, weights: _Run) -> _Run | None:
        """The part of these weight gradients that falls to this debt, now with microbatches; None if there is none."""
        ahead = weights.number - self.number
        first = -(-ahead // self.stride) if ahead > 0 else 0
        end = min(self.inputs.times, -(-(ahead + weights.times) // self.stride))
        if first >= end:
            return None
        return _Run(
            note="W" + self.inputs.note[1],
            is_joined=weights.is_joined,
            times=end - first,
            place=weights.place + (first * self.stride - ahead) * weights.stride,
            stride=weights.stride * self.stride,
            number=self.inputs.number + first,
        )


def play(rows: Sequence[Iterable[tuple[str, int]]], microbatches: int) -> list[Codes]:
    """The actions of ranks with two stages each, placed in a V; of every rank the phases, as (pattern, how often).

    In a pattern, ``F0`` is the next forward of the rank's first stage, ``B1`` or ``I1`` the next backward of its
    second; ``W1`` is the weight gradient of the earliest ``I1`` that still owes it, ``W`` the same for either stage;
    ``F0+B1`` runs both together. A note comes once in a pattern, and all weight gradients are ``W`` or none is.

    The phases may be for more microbatches than there are: those hold their places and are left out. No action waits
    for one of another microbatch, so what is left of an order that runs still runs. The time is for what is played.

    >>> phases = [("F0 F1", 1), ("F0+B1 F1", 1), ("I1 I0", 1), ("W", 2), ("B0", 1)]
    >>> packed.unpack_cells(*play([phases], microbatches=2))
    (0F0, 1F0, (0F1;1B0)OVERLAP_F_B, 1F1, 1I1, 0I0, 1W1, 0W0, 0B1)
    >>> packed.unpack_cells(*play([phases], microbatches=1))
    (0F0, 1F0, 1B0, 0I0, 0W0)
    """
    runs = [(rank, run) for rank, phases in enumerate(rows) for run in _runs(phases) if run.number < microbatches]
    ranks = np.array([rank for rank, _ in runs])
    facts = chain.from_iterable(run.facts for _, run in runs)
    first, second, times, place, stride, number, is_joined = np.fromiter(facts, np.int64).reshape(-1, 7).T
    codes = packed.further(first, np.where(second, 2 * len(rows) - 1 - ranks, ranks))
    codes = packed.later(codes, number)

    times = np.minimum(times, microbatches - number)
    repetition = np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
    codes = packed.later(np.repeat(codes, times), repetition)
    place = np.repeat(place, times) + np.repeat(stride, times) * repetition
    is_joined = np.repeat(is_joined, times)
    ends = np.cumsum(np.bincount(ranks, times, len(rows)).astype(np.int64)).tolist()
    bounds = [slice(begin, end) for begin, end in pairwise([0, *ends])]
    return [_in_order(codes[row], place[row], is_joined[row]) for row in bounds]


def _in_order(codes: Codes, place: NDArray[np.int64], is_joined: NDArray[np.int64]) -> Codes:
    order = place.argsort(kind="stable")  # it merges what is in order already: few runs, so this is linear
    is_joined[order[1:]] &= np.diff(place[order]) == 1  # the one before may have been left out
    return np.asarray((codes + is_joined * packed.JOINED)[order])


def _runs(phases: Iterable[tuple[str, int]]) -> Iterator[_Run]:
    """The notes of the phases with their microbatches; weight gradients have those of the debts that they pay."""
    place = 0
    count = dict.fromkeys((*_FIRST, "W"), 0)
    owed = dict.fromkeys(_OWED_BY, 0)
    debts: dict[str, list[_Debt]] = {weight: [] for weight in _OWED_BY}
    paying: list[_Run] = []
    for text, times in phases:
        if times <= 0:
            continue
        pattern = _pattern(text)
        runs = {}
        for offset, (note, sequence, is_joined) in enumerate(pattern.notes):
            runs[note] = _Run(note, is_joined, times, place + offset, len(pattern.notes), count[sequence])
            count[sequence] += times
        place += times * len(pattern.notes)
        for weight, inputs in pattern.owed:
            debts[weight] += (
                _Debt(runs[note], owed[weight] + position, len(inputs)) for position, note in enumerate(inputs)
            )
            owed[weight] += times * len(inputs)
        paying += (runs.pop(note) for note in pattern.weights)
        yield from runs.values()
    for weights in paying:
        yield from (paid for debt in debts[weights.note] if (paid := debt.paid_by(weights)))


class _Pattern(NamedTuple):
    """What to know about a pattern."""

    #: Each note, what it is counted with, and whether it runs together with the one before.
    notes: tuple[tuple[str, str, bool], ...]
    weights: tuple[str, ...]
    #: The weight gradients that its input gradients owe, to be paid by each sort of them.
    owed: tuple[tuple[str, tuple[str, ...]], ...]


@cache
def _pattern(text: str) -> _Pattern:
    together = [(note, place > 0) for group in text.split() for place, note in enumerate(group.split("+"))]
    notes = [note for note, _ in together]
    owed = {weight: tuple(note for note in notes if note in inputs) for weight, inputs in _OWED_BY.items()}
    return _Pattern(
        tuple((note, _SEQUENCE.get(note, note), is_joined) for note, is_joined in together),
        tuple(note for note in notes if note in _OWED_BY),
        tuple((weight, inputs) for weight, inputs in owed.items() if inputs),
    )
