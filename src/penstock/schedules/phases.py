"""The player for schedules that are phases of a repeated pattern, on ranks with two stages."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.ir.packed import Codes

#: The first action of each note on stage 0.
_FIRST: Final = {
    note: int(packed.pack(0, ComputationType(note[0]), 0)) for note in ("F0", "F1", "B0", "B1", "I0", "I1", "W0", "W1")
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


class _Debt(NamedTuple):
    """The weight gradients that a run of input gradients owes: their numbers, evenly spaced."""

    inputs: _Run
    number: int
    stride: int

    def paid_by(self, weights: _Run) -> _Run | None:
        """The part of these weight gradients that falls to this debt, now with microbatches; None if there is none."""
        ahead = weights.number - self.number
        first = max(0, -(-ahead // self.stride))
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


def play(phases: Iterable[tuple[str, int]], stages: tuple[int, int], microbatches: int) -> Codes:
    """The actions of a rank with these two stages, from phases of (pattern, how often).

    In a pattern, ``F0`` is the next forward of the rank's first stage, ``B1`` or ``I1`` the next backward of its
    second; ``W1`` is the weight gradient of the earliest ``I1`` that still owes it, ``W`` the same for either stage;
    ``F0+B1`` runs both together. A note comes once in a pattern, and all of a schedule are ``W`` or none.

    The phases may be for more microbatches than there are: those hold their places and are left out. No action waits
    for one of another microbatch, so what is left of an order that runs still runs. The time is for what is played.

    >>> phases = [("F0 F1", 1), ("F0+B1 F1", 1), ("I1 I0", 1), ("W", 2), ("B0", 1)]
    >>> packed.unpack_cells(play(phases, stages=(0, 3), microbatches=2))
    (0F0, 3F0, (0F1;3B0)OVERLAP_F_B, 3F1, 3I1, 0I0, 3W1, 0W0, 0B1)
    >>> packed.unpack_cells(play(phases, stages=(0, 3), microbatches=1))
    (0F0, 3F0, 3B0, 0I0, 0W0)
    """
    runs = [run for run in _runs(phases) if run.number < microbatches]
    firsts = np.array([_FIRST[run.note] for run in runs])
    firsts = packed.further(firsts, np.array([stages[int(run.note[1])] for run in runs]))
    firsts = packed.later(firsts, np.array([run.number for run in runs]))

    times = np.array([min(run.times, microbatches - run.number) for run in runs])
    repetitions = np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
    places = (
        np.repeat([run.place for run in runs], times) + np.repeat([run.stride for run in runs], times) * repetitions
    )
    in_order = places.argsort(kind="stable")  # a merge of evenly spaced runs, and few of them: linear

    joined = np.repeat([run.is_joined for run in runs], times)[in_order]
    joined[1:] &= np.diff(places[in_order]) == 1  # the one before may have been left out
    codes = packed.later(np.repeat(firsts, times), repetitions)[in_order]
    return np.asarray(codes + joined * np.int64(packed.JOINED))


def _runs(phases: Iterable[tuple[str, int]]) -> Iterator[_Run]:
    """The notes of the phases with their microbatches; weight gradients have those of the debts that they pay."""
    place, count = 0, Counter[str]()
    debts: dict[str, list[_Debt]] = {queue: [] for queue in _OWED_BY}
    paying: list[_Run] = []
    for text, times in phases:
        if times <= 0:
            continue
        pattern = _pattern(text)
        runs: dict[str, _Run] = {}
        for offset, (note, is_joined) in enumerate(pattern):
            sequence = _SEQUENCE.get(note, note)
            runs[note] = _Run(note, is_joined, times, place + offset, len(pattern), count[sequence])
            count[sequence] += times
        place += times * len(pattern)
        for queue, owing in _OWED_BY.items():
            inputs = [run for note, run in runs.items() if note in owing]
            for position, run in enumerate(inputs):
                debts[queue].append(_Debt(run, count[f"debts of {queue}"] + position, len(inputs)))
            count[f"debts of {queue}"] += times * len(inputs)
        paying += (run for note, run in runs.items() if note in _OWED_BY)
        yield from (run for note, run in runs.items() if note not in _OWED_BY)
    for weights in paying:
        yield from filter(None, (debt.paid_by(weights) for debt in debts[weights.note]))


@cache
def _pattern(text: str) -> tuple[tuple[str, bool], ...]:
    """Each note, and whether it runs together with the one before."""
    return tuple((note, place > 0) for group in text.split() for place, note in enumerate(group.split("+")))
