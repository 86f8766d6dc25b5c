"""The player for schedules that are phases of a repeated pattern, on ranks with two stages."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ir.packed import Codes

_NOTES: Final = ("F0", "F1", "B0", "B1", "I0", "I1", "W0", "W1", "W")
_F0, _F1, _B0, _B1, _I0, _I1, _W0, _W1, _W = range(len(_NOTES))

#: The first action of each note on stage 0, and whether it is of the first or the second stage.
_AT_STAGE_0: Final = np.array([packed.pack(0, ComputationType(name[0]), 0) for name in _NOTES])
_CHUNKS: Final = np.array([int(name[1:] or 0) for name in _NOTES])

#: Which notes count microbatches together: a whole backward and its first half are one sequence.
_COUNTED: Final = ((_F0,), (_F1,), (_B0, _I0), (_B1, _I1))
#: Which weight gradients pay for which input gradients.
_OWED: Final = ((_W0, (_I0,)), (_W1, (_I1,)), (_W, (_I0, _I1)))


class _Pattern(NamedTuple):
    """A pattern as bytes: which note, and whether it runs together with the one before."""

    notes: bytes
    joined: bytes


def play(phases: Iterable[tuple[str, int]], stages: tuple[int, int]) -> Codes:
    """The actions of a rank with these two stages, from phases of (pattern, how often).

    In a pattern, ``F0`` is the next forward of the rank's first stage, ``B1`` or ``I1`` the next backward of its
    second; ``W1`` is the weight gradient of the earliest ``I1`` that still owes it, ``W`` the same for either stage;
    ``F0+B1`` runs both together.

    >>> packed.unpack_cells(play([("F0 F1", 1), ("F0+B1 F1", 1), ("I1 I0", 1), ("W", 2), ("B0", 1)], stages=(0, 3)))
    (0F0, 3F0, (0F1;3B0)OVERLAP_F_B, 3F1, 3I1, 0I0, 3W1, 0W0, 0B1)
    """
    played = [(_pattern(text), times) for text, times in phases if times > 0]
    notes = np.frombuffer(b"".join(pattern.notes * times for pattern, times in played), np.uint8)
    joined = np.frombuffer(b"".join(pattern.joined * times for pattern, times in played), np.uint8)
    codes = packed.further(_AT_STAGE_0, np.array(stages)[_CHUNKS])[notes]
    for counted in _COUNTED:
        places = _places(notes, counted)
        codes[places] = packed.later(codes[places], np.arange(len(places)))
    for weight, inputs in _OWED:
        places = _places(notes, (weight,))
        if not len(places):
            continue
        owing = codes[_places(notes, inputs)[: len(places)]]
        codes[places] = packed.retyped(owing, BACKWARD_INPUT, BACKWARD_WEIGHT)
    return np.asarray(codes + joined * np.int64(packed.JOINED))


def _places(
    notes: np.ndarray[tuple[int], np.dtype[np.uint8]], wanted: tuple[int, ...]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    chosen = notes == wanted[0]
    for note in wanted[1:]:
        chosen |= notes == note
    return np.asarray(chosen.nonzero()[0])


@cache
def _pattern(text: str) -> _Pattern:
    together = [group.split("+") for group in text.split()]
    return _Pattern(
        bytes(_NOTES.index(note) for group in together for note in group),
        bytes(position > 0 for group in together for position in range(len(group))),
    )
