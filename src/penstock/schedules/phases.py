"""Expands schedules that are written as phases of a repeated pattern, on ranks with two stages."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.ir.packed import Codes

#: The tokens of a pattern, numbered; ``packed.JOINED`` is added for one that runs together with the one before it.
_TOKENS: Final = {token: number for number, token in enumerate(("F0", "F1", "B0", "B1", "I0", "I1", "W0", "W1", "W"))}
#: By token number: its first action, on stage 0; and whether it is for the second stage.
_FIRST, _SECOND = np.zeros((2, 2 * packed.JOINED), np.int64)
for _token, _number in _TOKENS.items():
    _either_way = [_number, _number + packed.JOINED]
    _FIRST[_either_way] = int(packed.pack(0, ComputationType(_token[0]), 0)) + np.array([0, packed.JOINED])
    _SECOND[_either_way] = _token.endswith("1")


def _mask(*tokens: str) -> NDArray[np.bool_]:
    """Return by token number whether it is one of these tokens."""
    mask = np.zeros(2 * packed.JOINED, bool)
    mask[[_TOKENS[token] + joined for token in tokens for joined in (0, packed.JOINED)]] = True
    return mask


#: The tokens that count through the microbatches together: a full backward and its first half share a sequence.
_SEQUENCES: Final = (_mask("F0"), _mask("F1"), _mask("B0", "I0"), _mask("B1", "I1"))
#: The weight gradients, and the input gradients that they complete, in the same order.
_WEIGHTS_AND_INPUTS: Final = (
    (_mask("W0"), _mask("I0")),
    (_mask("W1"), _mask("I1")),
    (_mask("W"), _mask("I0", "I1")),
)


def expand_phases(rows: Sequence[Iterable[tuple[str, int]]], microbatches: int) -> list[Codes]:
    """Return the rows of ranks with two stages each, placed in a V, from their phases: pairs of (pattern, repetitions).

    In a pattern, ``F0`` is the next forward of the rank's first stage, ``B1`` or ``I1`` the next backward of its
    second; ``W1`` is the weight gradient of the earliest ``I1`` that has none yet, ``W`` the same for either stage;
    ``F0+B1`` runs both together. Either all weight gradients are ``W`` or none. Every stage runs equally many
    microbatches, whole or in halves.

    The phases may be for more microbatches than there are: the additional ones are padding and are dropped. No action
    waits for one of another microbatch, so what is left of an order that runs still runs. O(n), padding included.

    >>> phases = [("F0 F1", 1), ("F0+B1 F1", 1), ("I1 I0", 1), ("W", 2), ("B0", 1)]
    >>> packed.unpack_cells(*expand_phases([phases], microbatches=2))
    (0F0, 1F0, (0F1;1B0)OVERLAP_F_B, 1F1, 1I1, 0I0, 1W1, 0W0, 0B1)
    >>> packed.unpack_cells(*expand_phases([phases], microbatches=1))
    (0F0, 1F0, 1B0, 0I0, 0W0)
    """
    written = [b"".join([_pattern(text) * times for text, times in phases]) for phases in rows]
    tokens, lengths = np.frombuffer(b"".join(written), np.uint8), [*map(len, written)]
    rank = np.arange(len(rows)).repeat(lengths)
    microbatch = np.empty(len(tokens), np.int64)
    for are_counted in _SEQUENCES:
        counted = are_counted[tokens].nonzero()[0].reshape(len(rows), -1)
        microbatch[counted] = np.arange(counted.shape[1])
    stage = np.where(_SECOND[tokens], 2 * len(rows) - 1 - rank, rank)
    for are_weights, are_inputs in _WEIGHTS_AND_INPUTS:
        weights = are_weights[tokens].nonzero()[0]
        if len(weights):
            inputs = are_inputs[tokens].nonzero()[0]
            stage[weights], microbatch[weights] = stage[inputs], microbatch[inputs]

    codes = packed.shift_microbatches(packed.shift_stages(_FIRST[tokens], stage), microbatch)
    there = microbatch < microbatches
    if not there.all():
        codes, lengths = packed.select(codes, there), np.bincount(rank[there], minlength=len(rows)).tolist()
    return [codes[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]


@cache
def _pattern(text: str) -> bytes:
    """Return the token numbers of a pattern."""
    groups = [[_TOKENS[token] for token in group.split("+")] for group in text.split()]
    return bytes(number + (packed.JOINED if place else 0) for group in groups for place, number in enumerate(group))
