"""An action as one 64-bit integer: how a schedule holds its actions, and what array code works on.

::

    bit   62 ............ 34   33 ............ 5     4        3 .. 0
          stage                microbatch + 1        joined   type

The type is counted from 1 in the order of ``ComputationType``, so 0 as a whole is an idle step. An overlap is not
packed itself: its sub-actions stand one after the other, and each but the first is *joined* to the one before it.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from penstock.ir.actions import COMPUTE, NO_STAGE, OVERLAP_F_B, SHARDING, Action, ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    #: Packed actions, one after the other.
    Codes: TypeAlias = NDArray[np.int64]

IDLE: Final = 0
JOINED: Final = 1 << 4

_TYPE_MASK: Final = (1 << 4) - 1
_MICROBATCH_SHIFT: Final = 5
_STAGE_SHIFT: Final = 34
_MICROBATCH_MASK: Final = (1 << (_STAGE_SHIFT - _MICROBATCH_SHIFT)) - 1

_TYPES: Final = (None, *ComputationType)
TYPE_NUMBER: Final = {kind: number for number, kind in enumerate(_TYPES) if kind is not None}

#: How many microbatches an action has, by its type, and whether it is joined: -1 where there is no such action.
_MICROBATCHES: Final = np.full((JOINED | _TYPE_MASK) + 1, -1, np.int8)
_MICROBATCHES[[number for kind, number in TYPE_NUMBER.items() if kind is not OVERLAP_F_B]] = 1
_MICROBATCHES[[IDLE, *(TYPE_NUMBER[kind] for kind in SHARDING)]] = 0
_MICROBATCHES[[JOINED | TYPE_NUMBER[kind] for kind in COMPUTE]] = 1
_MICROBATCH_BITS: Final = _MICROBATCH_MASK << _MICROBATCH_SHIFT
_BLOCK: Final = 1 << 15


@cache
def kind_mask(kinds: frozenset[ComputationType] | tuple[ComputationType, ...]) -> NDArray[np.bool_]:
    """For every number of a type, and for that of an idle step, whether it is one of these types."""
    among = np.zeros(_TYPE_MASK + 1, bool)
    among[[TYPE_NUMBER[kind] for kind in kinds]] = True
    among.setflags(write=False)
    return among


_IS_OTHER: Final = kind_mask(tuple(kind for kind in ComputationType if kind not in COMPUTE))


def pack(stage: int | NDArray[np.int64], kind: ComputationType, microbatch: int | NDArray[np.int64] | None) -> Codes:
    """The codes of one kind of action for arrays (or one) of stages and microbatches."""
    above = 0 if microbatch is None else np.asarray(microbatch, np.int64) + 1
    stage_bits = np.asarray(stage, np.int64) << _STAGE_SHIFT
    return np.asarray(stage_bits | (above << _MICROBATCH_SHIFT) | TYPE_NUMBER[kind], np.int64)


def shift_microbatches(codes: Codes, microbatches: NDArray[np.int64]) -> Codes:
    """The same actions so many microbatches later."""
    return np.asarray(codes + (microbatches << _MICROBATCH_SHIFT))


def change_kind(codes: Codes, old: ComputationType, new: ComputationType) -> Codes:
    """The same actions, all of one type, as another type."""
    return np.asarray(codes + (TYPE_NUMBER[new] - TYPE_NUMBER[old]))


def with_kinds(codes: Codes, kinds: NDArray[np.int64]) -> Codes:
    """Actions of the same stages and microbatches, but of these types (as numbers), and joined to none."""
    return np.asarray(codes & ~(JOINED | _TYPE_MASK) | kinds)


def shift_stages(codes: Codes, stages: NDArray[np.int64]) -> Codes:
    """The same actions so many stages further on."""
    return np.asarray(codes + (stages << _STAGE_SHIFT))


def pack_cells(cells: Iterable[Action | None]) -> Codes:
    """The codes of a row of actions and idle steps."""
    codes: list[int] = []
    for cell in cells:
        if cell is None:
            codes.append(IDLE)
            continue
        first = len(codes)
        for stage, kind, microbatch, _ in cell.parts:
            above = 0 if microbatch is None else microbatch + 1
            codes.append(stage << _STAGE_SHIFT | above << _MICROBATCH_SHIFT | JOINED | TYPE_NUMBER[kind])
        codes[first] ^= JOINED
    return np.array(codes, np.int64)


def unpack_cells(codes: Codes) -> tuple[Action | None, ...]:
    """The row of actions and idle steps that these codes stand for."""
    parts = _unpack_parts(codes)
    if not is_joined(codes).any():
        return tuple(parts)
    bounds = [*cell_starts(codes).tolist(), len(parts)]
    return tuple(
        parts[start]
        if end - start == 1
        else tuple.__new__(Action, (NO_STAGE, OVERLAP_F_B, None, tuple(parts[start:end])))
        for start, end in pairwise(bounds)
    )


def _unpack_parts(codes: Codes) -> list[Action | None]:
    kinds = [_TYPES[number] for number in types(codes).tolist()]
    of_microbatch = microbatches(codes)
    numbers = of_microbatch.tolist()
    for place in np.flatnonzero(of_microbatch < 0).tolist():
        numbers[place] = None
    fields = zip(stages(codes).tolist(), kinds, numbers, repeat(None), strict=False)
    # Action.__new__ checks its fields; these were checked when they were packed.
    parts: list[Action | None] = list(map(tuple.__new__, repeat(Action), fields))
    for place in np.flatnonzero(codes == IDLE).tolist():
        parts[place] = None
    return parts


def stages(codes: Codes) -> NDArray[np.int64]:
    """The stage of each code."""
    return codes >> _STAGE_SHIFT


def largest(codes: Codes) -> tuple[int, int]:
    """The largest stage and the largest microbatch of the codes; -1 if there are none."""
    if not len(codes):
        return -1, -1
    return int(codes.max()) >> _STAGE_SHIFT, (int((codes & _MICROBATCH_BITS).max()) >> _MICROBATCH_SHIFT) - 1


def types(codes: Codes) -> NDArray[np.int64]:
    """The type of each code: a number of ``TYPE_NUMBER``, or 0 for an idle step."""
    return codes & _TYPE_MASK


def microbatches(codes: Codes) -> NDArray[np.int64]:
    """The microbatch of each code, or -1 where there is none."""
    return ((codes >> _MICROBATCH_SHIFT) & _MICROBATCH_MASK) - 1


def is_joined(codes: Codes) -> NDArray[np.bool_]:
    """Whether each code runs together with the one before it."""
    return (codes & JOINED).astype(bool)


def is_compute_or_idle(codes: Codes) -> NDArray[np.bool_]:
    """Whether each code is what a compute-only schedule may hold."""
    return ~_IS_OTHER[types(codes)]


def is_wellformed(codes: Codes, offsets: NDArray[np.int64]) -> bool:
    """Whether these codes, whose ranks begin at the offsets, stand for actions, and for overlaps of compute actions."""
    blocks = [codes[begin : begin + _BLOCK] for begin in range(0, len(codes), _BLOCK)]  # which fit into the caches
    if not all(map(_are_actions, blocks)):
        return False
    if not any((block & JOINED).any() for block in blocks):
        return True
    begin = offsets[:-1][offsets[:-1] < len(codes)]
    before = codes[(codes & JOINED).nonzero()[0] - 1]
    return bool(not (codes[begin] & JOINED).any() and kind_mask(COMPUTE)[types(before)].all())


def _are_actions(codes: Codes) -> bool:
    has_microbatch = codes & _MICROBATCH_BITS > 0
    return bool(codes.min() >= 0 and (_MICROBATCHES[codes & (JOINED | _TYPE_MASK)] == has_microbatch).all())


def cell_starts(codes: Codes) -> NDArray[np.int64]:
    """Where each step begins in the codes: an overlap is one step."""
    return np.flatnonzero(~is_joined(codes))


def select(codes: Codes, wanted: NDArray[np.bool_]) -> Codes:
    """Only the wanted actions; what was overlapped with one that is gone stands alone."""
    cells = np.cumsum(~is_joined(codes))[wanted]
    kept = codes[wanted] & ~JOINED
    kept[1:] |= np.where(cells[1:] == cells[:-1], JOINED, 0)
    return kept
