"""Expands schedules that are written as phases of a repeated pattern, on ranks with two stages."""

from __future__ import annotations

from collections import defaultdict
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

#: The first action of each token, on stage 0, and whether the token is for the second stage.
_FIRST: Final = {
    kind + stage: (int(packed.pack(0, ComputationType(kind), 0)), int(stage)) for kind in "FBIW" for stage in "01"
}
#: The sequence that a token counts with: a full backward and its first half share a sequence of microbatches.
_SEQUENCE: Final = {"I0": "B0", "I1": "B1"}
#: The weight gradients, and the input gradients that owe them.
_OWED_BY: Final = {"W0": ("I0",), "W1": ("I1",), "W": ("I0", "I1")}


class _Run(NamedTuple):
    """A token of a phase: once in every repetition, at evenly spaced places of the row."""

    #: The token's first action, on stage 0, and whether it is for the second stage.
    first: int
    second: int
    times: int
    place: int
    stride: int
    #: Its number in the sequence: the first microbatch, or for a weight gradient how many came before.
    number: int
    #: Whether it runs together with the token before it.
    joined: int


class _OwedWeights(NamedTuple):
    """The weight gradients that a run of input gradients owes: their numbers, evenly spaced."""

    inputs: _Run
    number: int
    stride: int

    def match(self, weights: _Run) -> _Run | None:
        """Return the part of these weight gradients that is owed here, with its microbatches; None if there is none."""
        ahead = weights.number - self.number
        first = -(-ahead // self.stride) if ahead > 0 else 0
        end = min(self.inputs.times, -(-(ahead + weights.times) // self.stride))
        if first >= end:
            return None
        return _Run(
            *_FIRST["W1" if self.inputs.second else "W0"],
            times=end - first,
            place=weights.place + (first * self.stride - ahead) * weights.stride,
            stride=weights.stride * self.stride,
            number=self.inputs.number + first,
            joined=weights.joined,
        )


def expand_phases(rows: Sequence[Iterable[tuple[str, int]]], microbatches: int) -> list[Codes]:
    """Return the rows of ranks with two stages each, placed in a V, from their phases: pairs of (pattern, repetitions).

    In a pattern, ``F0`` is the next forward of the rank's first stage, ``B1`` or ``I1`` the next backward of its
    second; ``W1`` is the weight gradient of the earliest ``I1`` that still owes one, ``W`` the same for either stage;
    ``F0+B1`` runs both together. A token appears once in a pattern, and either all weight gradients are ``W`` or none.

    The phases may be for more microbatches than there are: the additional ones are padding and are dropped. No action
    waits for one of another microbatch, so what is left of an order that runs still runs. The time is linear in what is
    left.

    >>> phases = [("F0 F1", 1), ("F0+B1 F1", 1), ("I1 I0", 1), ("W", 2), ("B0", 1)]
    >>> packed.unpack_cells(*expand_phases([phases], microbatches=2))
    (0F0, 1F0, (0F1;1B0)OVERLAP_F_B, 1F1, 1I1, 0I0, 1W1, 0W0, 0B1)
    >>> packed.unpack_cells(*expand_phases([phases], microbatches=1))
    (0F0, 1F0, 1B0, 0I0, 0W0)
    """
    runs = [[run for run in _runs(phases) if run.number < microbatches] for phases in rows]
    facts = np.fromiter(chain.from_iterable(chain.from_iterable(runs)), np.int64).reshape(-1, len(_Run._fields))
    first, second, times, place, stride, number, joined = facts.T
    rank = np.repeat(np.arange(len(rows)), [len(row) for row in runs])
    codes = packed.shift_microbatches(
        packed.shift_stages(first, np.where(second, 2 * len(rows) - 1 - rank, rank)), number
    )

    times = np.minimum(times, microbatches - number)
    ends = times.cumsum()
    which = np.repeat(np.arange(len(times)), times)
    repetition = np.arange(len(which)) - (ends - times)[which]
    codes = packed.shift_microbatches(codes[which], repetition)
    place = place[which] + stride[which] * repetition
    lengths = np.bincount(rank, times, len(rows)).astype(np.int64).cumsum().tolist()
    return [
        _in_order(codes[begin:end], place[begin:end], joined[which[begin:end]])
        for begin, end in pairwise([0, *lengths])
    ]


def _in_order(codes: Codes, place: NDArray[np.int64], joined: NDArray[np.int64]) -> Codes:
    order = place.argsort(kind="stable")  # a merge of a few sorted runs, so it is linear
    place, joined = place[order], joined[order]
    joined[1:] &= place[1:] - place[:-1] == 1  # the one before may have been dropped
    return np.asarray(codes[order] + joined * packed.JOINED)


def _runs(phases: Iterable[tuple[str, int]]) -> Iterator[_Run]:
    """Yield the tokens of the phases with their microbatches; weight gradients take those that are owed."""
    place = 0
    count: dict[str, int] = defaultdict(int)
    owed: dict[str, int] = defaultdict(int)
    owed_weights: dict[str, list[_OwedWeights]] = defaultdict(list)
    weight_runs: list[tuple[str, _Run]] = []
    for text, times in phases:
        if times <= 0:
            continue
        pattern = _pattern(text)
        length = len(pattern.tokens)
        runs = {}
        for offset, (token, first, second, sequence, joined) in enumerate(pattern.tokens):
            runs[token] = _Run(first, second, times, place + offset, length, count[sequence], joined)
            count[sequence] += times
        place += times * length
        for weight, inputs in pattern.owed:
            for position, token in enumerate(inputs):
                owed_weights[weight].append(_OwedWeights(runs[token], owed[weight] + position, len(inputs)))
            owed[weight] += times * len(inputs)
        for token in pattern.weights:
            weight_runs.append((token, runs.pop(token)))
        yield from runs.values()
    for token, weights in weight_runs:
        for owing in owed_weights[token]:
            if matched := owing.match(weights):
                yield matched


class _Pattern(NamedTuple):
    """A parsed pattern."""

    #: Each token, its first action, whether it is for the second stage, its sequence, and whether it runs together with
    #: the one before it.
    tokens: tuple[tuple[str, int, int, str, bool], ...]
    weights: tuple[str, ...]
    #: For each kind of weight gradient, the input gradients that owe it.
    owed: tuple[tuple[str, tuple[str, ...]], ...]


@cache
def _pattern(text: str) -> _Pattern:
    together = [(token, place > 0) for group in text.split() for place, token in enumerate(group.split("+"))]
    tokens = [token for token, _ in together]
    owed = {weight: tuple(token for token in tokens if token in inputs) for weight, inputs in _OWED_BY.items()}
    return _Pattern(
        tuple((token, *_FIRST.get(token, (0, 0)), _SEQUENCE.get(token, token), joined) for token, joined in together),
        tuple(token for token in tokens if token in _OWED_BY),
        tuple((weight, inputs) for weight, inputs in owed.items() if inputs),
    )
