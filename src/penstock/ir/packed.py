"""Packs an action into one 64-bit integer: how a schedule stores its actions, and what array code works on.

::

    bit   62 .... 48   47 .... 34   33 ............ 5     4        3 .. 0
          stage        hop          microbatch + 1        joined   type

Types are numbered from 1 in the order of ``ComputationType``, so a code of 0 is an idle step. An overlap has no code:
its sub-actions follow each other, and each but the first is *joined* to the one before it. The hop of a transfer is the
number of stages between its own and the one it exchanges with: 0 in a chain, and for everything that is no transfer.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from penstock.ir.actions import (
    COMPUTE,
    LARGEST_STAGE,
    NO_STAGE,
    OVERLAP_F_B,
    PEER_SIDE,
    SHARDING,
    Action,
    ComputationType,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    #: A sequence of packed actions.
    Codes: TypeAlias = NDArray[np.int64]

IDLE: Final = 0
JOINED: Final = 1 << 4

_TYPE_MASK: Final = (1 << 4) - 1
_MICROBATCH_SHIFT: Final = 5
_HOP_SHIFT: Final = 34
_STAGE_SHIFT: Final = 48
_MICROBATCH_MASK: Final = (1 << (_HOP_SHIFT - _MICROBATCH_SHIFT)) - 1
_HOP_MASK: Final = (1 << (_STAGE_SHIFT - _HOP_SHIFT)) - 1
_HOP_BITS: Final = _HOP_MASK << _HOP_SHIFT

_TYPES: Final = (None, *ComputationType)
TYPE_NUMBER: Final = {kind: number for number, kind in enumerate(_TYPES) if kind is not None}
_SIDE: Final = np.array([0 if kind is None else PEER_SIDE.get(kind, 0) for kind in _TYPES])

#: Which combinations of a type, the joined bit, and whether there is a microbatch, are valid.
_FORM_MASK: Final = JOINED | _TYPE_MASK
_WITH_MICROBATCH: Final = 1 << _MICROBATCH_SHIFT
_IS_FORM: Final = np.zeros(2 * _WITH_MICROBATCH, bool)
_IS_FORM[[IDLE, *(TYPE_NUMBER[kind] for kind in SHARDING)]] = True
for _kind in {*ComputationType} - {OVERLAP_F_B, *SHARDING}:
    _IS_FORM[_WITH_MICROBATCH | TYPE_NUMBER[_kind]] = True
    _IS_FORM[_WITH_MICROBATCH | JOINED | TYPE_NUMBER[_kind]] = _kind in COMPUTE
_MICROBATCH_BITS: Final = _MICROBATCH_MASK << _MICROBATCH_SHIFT
_BLOCK: Final = 1 << 15


@cache
def kind_mask(kinds: frozenset[ComputationType] | tuple[ComputationType, ...]) -> NDArray[np.bool_]:
    """Return, for every type number (0 is an idle step), whether it is one of these types."""
    among = np.zeros(_TYPE_MASK + 1, bool)
    among[[TYPE_NUMBER[kind] for kind in kinds]] = True
    among.setflags(write=False)
    return among


_IS_COMPUTE: Final = kind_mask(COMPUTE)
_IS_OTHER: Final = kind_mask(tuple(kind for kind in ComputationType if kind not in COMPUTE))


def pack(stage: int | NDArray[np.int64], kind: ComputationType, microbatch: int | NDArray[np.int64] | None) -> Codes:
    """Return the codes of one type of action for arrays (or one) of stages and microbatches."""
    above = 0 if microbatch is None else np.asarray(microbatch, np.int64) + 1
    stage_bits = np.asarray(stage, np.int64) << _STAGE_SHIFT
    return np.asarray(stage_bits | (above << _MICROBATCH_SHIFT) | TYPE_NUMBER[kind], np.int64)


def shift_microbatches(codes: Codes, microbatches: NDArray[np.int64]) -> Codes:
    """Return the same actions with their microbatch numbers increased."""
    return np.asarray(codes + (microbatches << _MICROBATCH_SHIFT))


def change_kind(codes: Codes, old: ComputationType, new: ComputationType) -> Codes:
    """Return the same actions, all of type ``old``, as actions of type ``new``."""
    return np.asarray(codes + (TYPE_NUMBER[new] - TYPE_NUMBER[old]))


def with_kinds(codes: Codes, kinds: NDArray[np.int64]) -> Codes:
    """Return actions with the same stages and microbatches but these type numbers, and not joined."""
    return np.asarray(codes & ~(JOINED | _TYPE_MASK) | kinds)


def shift_stages(codes: Codes, stages: NDArray[np.int64]) -> Codes:
    """Return the same actions with their stage numbers increased."""
    return np.asarray(codes + (stages << _STAGE_SHIFT))


def pack_cells(cells: Iterable[Action | None]) -> Codes:
    """Return the codes of a row of actions and idle steps."""
    codes: list[int] = []
    for cell in cells:
        if cell is None:
            codes.append(IDLE)
            continue
        first = len(codes)
        for part in cell.parts:
            stage, kind, microbatch = part[:3]
            above = 0 if microbatch is None else microbatch + 1
            codes.append(stage << _STAGE_SHIFT | above << _MICROBATCH_SHIFT | JOINED | TYPE_NUMBER[kind])
            if len(part) > 4:
                codes[-1] |= (abs(part[4] - stage) - 1) << _HOP_SHIFT
        codes[first] ^= JOINED
    return np.array(codes, np.int64)


def unpack_cells(codes: Codes) -> tuple[Action | None, ...]:
    """Return the row of actions and idle steps with these codes."""
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
    # Without Action.__new__, which checks the fields: they were checked when they were packed.
    parts: list[Action | None] = list(map(tuple.__new__, repeat(Action), fields))
    for place in np.flatnonzero(codes == IDLE).tolist():
        parts[place] = None
    if has_hops(codes):
        far = np.flatnonzero(hops(codes))
        for place, peer in zip(far.tolist(), peers(codes[far]).tolist(), strict=True):
            parts[place] = tuple.__new__(Action, (*(parts[place] or ()), peer))
    return parts


def stages(codes: Codes) -> NDArray[np.int64]:
    """Return the stage of each code."""
    return codes >> _STAGE_SHIFT


def has_hops(codes: Codes) -> bool:
    """Return whether any transfer goes further than to the next stage."""
    return bool(int(np.bitwise_or.reduce(codes)) & _HOP_BITS)


def hops(codes: Codes) -> NDArray[np.int64]:
    """Return the number of stages between the stage of each transfer and the one it exchanges with."""
    return (codes >> _HOP_SHIFT) & _HOP_MASK


def add_hops(codes: Codes, hops: NDArray[np.int64] | int) -> Codes:
    """Return the same transfers, which have no hops, with these."""
    return np.asarray(codes + (np.asarray(hops, np.int64) << _HOP_SHIFT))


def peers(codes: Codes) -> NDArray[np.int64]:
    """Return the stage that each transfer exchanges with, whether or not it exists; its own stage if it is none."""
    return np.asarray(stages(codes) + _SIDE[types(codes)] * (hops(codes) + 1))


def largest(codes: Codes) -> tuple[int, int]:
    """Return the largest stage and the largest microbatch; -1 if there are none."""
    if not len(codes):
        return -1, -1
    return int(codes.max()) >> _STAGE_SHIFT, (int((codes & _MICROBATCH_BITS).max()) >> _MICROBATCH_SHIFT) - 1


def types(codes: Codes) -> NDArray[np.int64]:
    """Return the type of each code: a number of ``TYPE_NUMBER``, or 0 for an idle step."""
    return codes & _TYPE_MASK


def microbatches(codes: Codes) -> NDArray[np.int64]:
    """Return the microbatch of each code, or -1 if it has none."""
    return ((codes >> _MICROBATCH_SHIFT) & _MICROBATCH_MASK) - 1


def is_joined(codes: Codes) -> NDArray[np.bool_]:
    """Return whether each code runs together with the one before it."""
    return (codes & JOINED).astype(bool)


def is_compute_or_idle(codes: Codes) -> NDArray[np.bool_]:
    """Return whether each code is allowed in a compute-only schedule."""
    return ~_IS_OTHER[types(codes)]


def is_wellformed(codes: Codes, offsets: NDArray[np.int64]) -> bool:
    """Return whether the codes, whose ranks begin at the offsets, are valid actions and overlaps."""
    used = 0  # the bits of all codes
    for begin in range(0, len(codes), _BLOCK):  # each block fits into the caches
        block = codes[begin : begin + _BLOCK]
        forms = (block & _FORM_MASK) | np.minimum(block & _MICROBATCH_BITS, _WITH_MICROBATCH)
        if not _IS_FORM.take(forms).all():
            return False
        used |= int(np.bitwise_or.reduce(block))
    if used < 0 or (used & _HOP_BITS and not _have_peers(codes)):
        return False
    if not used & JOINED:
        return True
    begins = offsets[:-1][offsets[:-1] < len(codes)]
    before = codes[(codes & JOINED).nonzero()[0] - 1]
    return bool(not (codes[begins] & JOINED).any() and _IS_COMPUTE[types(before)].all())


def _have_peers(codes: Codes) -> bool:
    """Return whether only transfers have hops, to stages that can exist, in codes that have some."""
    far = codes[hops(codes) > 0]
    peer = peers(far)
    return bool(_SIDE[types(far)].all() and peer.min() >= 0 and peer.max() <= LARGEST_STAGE)


def cell_starts(codes: Codes) -> NDArray[np.int64]:
    """Return where each step begins in the codes; an overlap is one step."""
    return np.flatnonzero(~is_joined(codes))


def select(codes: Codes, wanted: NDArray[np.bool_]) -> Codes:
    """Keep only the wanted actions; what remains of an overlap still runs together."""
    cells = np.cumsum(~is_joined(codes))[wanted]
    kept = codes[wanted] & ~JOINED
    kept[1:] |= np.where(cells[1:] == cells[:-1], JOINED, 0)
    return kept
