"""Finds the activation checkpoints that a model's glue puts around calls, which the backward will run again."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from torch.utils.checkpoint import checkpoint

from penstock.errors import SplitError
from penstock.models.record import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_CODE: Final = inspect.unwrap(checkpoint).__code__


@dataclass
class _Region:
    calls: list[int] = field(default_factory=list)
    has_tail: bool = False


class CheckpointRegions:
    """The checkpoints of one forward, distinguished by their frames on the stack."""

    def __init__(self) -> None:
        self._regions: dict[FrameType, _Region] = {}

    def enter(self, call: int, unit: str) -> None:
        """Note the checkpoints around a call."""
        for frame in _checkpoint_frames():
            if frame.f_locals.get("use_reentrant") is not False:
                raise SplitError(
                    f"{unit!r} is called in a reentrant checkpoint, which hides its gradient from other stages; pass "
                    "use_reentrant=False to torch.utils.checkpoint.checkpoint",
                    unit=unit,
                )
            region = self._regions.setdefault(frame, _Region())
            region.calls.append(call)
            region.has_tail = False

    def note_glue(self) -> None:
        """Note that glue computes something, perhaps in a checkpoint, behind the last call there so far."""
        for frame in _checkpoint_frames() if self._regions else ():
            if frame in self._regions:
                self._regions[frame].has_tail = True

    def found(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints that have calls in them."""
        return tuple(Checkpoint(tuple(region.calls), region.has_tail) for region in self._regions.values())


def _checkpoint_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CODE:
            yield frame
        frame = frame.f_back
