"""The player for schedules that are phases of a repeated pattern, on ranks with two stages."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_WEIGHT, ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ir.packed import Codes

_OWED: Final = "W"
_NOTES: Final = ("F0", "F1", "B0", "B1", "I0", "I1", "W0", "W1", _OWED)


class _Pattern(NamedTuple):
    notes: tuple[int, ...]
    joined: tuple[bool, ...]


def play(phases: Iterable[tuple[str, int]], stages: tuple[int, int]) -> Codes:
    """The actions of a rank with these two stages, from phases of (pattern, how often).

    In a pattern, ``F0`` is the next forward of the rank's first stage, ``B1`` or ``I1`` the next backward of its
    second; ``W1`` is the weight gradient of the earliest ``I1`` that still owes it, ``W`` the same for either stage;
    ``F0+B1`` runs both together.

    >>> packed.unpack_cells(play([("F0 F1", 1), ("F0+B1 F1", 1), ("I1 I0", 1), ("W", 2), ("B0", 1)], stages=(0, 3)))
    (0F0, 3F0, (0F1;3B0)OVERLAP_F_B, 3F1, 3I1, 0I0, 3W1, 0W0, 0B1)
    """
    played = [(_pattern(text), times) for text, times in phases if times > 0]
    notes = np.concatenate([np.tile(np.array(pattern.notes), times) for pattern, times in played])
    joined = np.concatenate([np.tile(np.array(pattern.joined), times) for pattern, times in played])
    codes = np.zeros(len(notes), np.int64)
    for chunk, stage in enumerate(stages):
        _number(codes, notes, stage, [f"F{chunk}"])
        _number(codes, notes, stage, [f"B{chunk}", f"I{chunk}"])
        _settle(codes, notes, weights=f"W{chunk}", inputs=[f"I{chunk}"])
    _settle(codes, notes, weights=_OWED, inputs=["I0", "I1"])
    return codes | np.where(joined, packed.JOINED, 0)


@cache
def _pattern(text: str) -> _Pattern:
    together = [group.split("+") for group in text.split()]
    return _Pattern(
        tuple(_NOTES.index(note) for group in together for note in group),
        tuple(position > 0 for group in together for position in range(len(group))),
    )


def _number(codes: Codes, notes: np.ndarray[tuple[int], np.dtype[np.int64]], stage: int, names: list[str]) -> None:
    """Give the notes with these names the microbatches 0, 1, 2, ... in the order in which they are played."""
    numbers = [_NOTES.index(name) for name in names]
    places = np.flatnonzero(np.isin(notes, numbers))
    microbatches = np.arange(len(places))
    for name, number in zip(names, numbers, strict=True):
        mine = notes[places] == number
        codes[places[mine]] = packed.pack(stage, ComputationType(name[0]), microbatches[mine])


def _settle(
    codes: Codes, notes: np.ndarray[tuple[int], np.dtype[np.int64]], *, weights: str, inputs: list[str]
) -> None:
    """Give the weight gradients with this name the stage and microbatch of the input gradients, first come first."""
    places = np.flatnonzero(notes == _NOTES.index(weights))
    owing = codes[np.flatnonzero(np.isin(notes, [_NOTES.index(name) for name in inputs]))][: len(places)]
    codes[places] = packed.pack(packed.stages(owing), BACKWARD_WEIGHT, packed.microbatches(owing))
