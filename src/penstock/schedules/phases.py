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

    from penstock.ir.packed import Codes

#: The tokens of a pattern, by the sequences in which they count through the microbatches: a full backward and its first
#: half share one. Weight gradients have sequences of their own, ``W`` one for both stages.
_SEQUENCES: Final = (("F0",), ("F1",), ("B0", "I0"), ("B1", "I1"), ("W0", "W"), ("W1",))
_COUNTED: Final = 4
#: All tokens, numbered; one that runs together with the one before it has a plus.
_TOKENS: Final = {
    plus + token: number + joined
    for plus, joined in (("", 0), ("+", packed.JOINED))
    for number, token in enumerate(token for sequence in _SEQUENCES for token in sequence)
}
#: By the number of a token: its first action, on stage 0; its sequence; whether it is for the second stage; whether it
#: is an input gradient, which a weight gradient completes.
_FIRST = np.zeros(2 * packed.JOINED, np.int64)
_SEQUENCE, _SECOND, _IS_INPUT = (np.zeros(len(_FIRST), kind) for kind in (np.uint8, bool, bool))
for _token, _number in _TOKENS.items():
    _kind = _token.lstrip("+")[0]
    _FIRST[_number] = int(packed.pack(0, ComputationType(_kind), 0)) + (_number & packed.JOINED)
    _SEQUENCE[_number] = [_token.lstrip("+") in sequence for sequence in _SEQUENCES].index(True)
    _SECOND[_number], _IS_INPUT[_number] = _token.endswith("1"), _kind == "I"


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
    stage = np.where(_SECOND[tokens], 2 * len(rows) - 1 - rank, rank)
    sequence, inputs = _SEQUENCE[tokens], _IS_INPUT[tokens].nonzero()[0]
    by_sequence, many = sequence.argsort(kind="stable"), len(tokens) - len(inputs)
    counted, weights = by_sequence[:many].reshape(_COUNTED * len(rows), -1), by_sequence[many:]
    microbatch = np.empty(len(tokens), np.int64)
    microbatch[counted] = np.arange(counted.shape[1])
    if (sequence[weights[-1:]] > _COUNTED).any():  # W0, then W1
        inputs = inputs[_SECOND[tokens[inputs]].argsort(kind="stable")]
    stage[weights], microbatch[weights] = stage[inputs], microbatch[inputs]

    codes = packed.shift_microbatches(packed.shift_stages(_FIRST[tokens], stage), microbatch)
    if counted.shape[1] > microbatches:
        there = microbatch < microbatches
        codes, lengths = packed.select(codes, there), np.bincount(rank[there], minlength=len(rows)).tolist()
    return [codes[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]


@cache
def _pattern(text: str) -> bytes:
    """Return the token numbers of a pattern."""
    return bytes(map(_TOKENS.__getitem__, text.replace("+", " +").split()))
