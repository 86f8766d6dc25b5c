"""Checks shared by the formats that hold rows of cells."""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.errors import FormatError, PenstockError, WriteError
from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.ir.schedule import Schedule


def check_rows_suffice(schedule: Schedule, target: str) -> None:
    """Refuse to write a schedule that its rows of actions alone do not determine."""
    try:
        inferred = Schedule.from_codes([schedule.codes_of(rank) for rank in range(schedule.ranks)])
    except PenstockError as fact:
        raise WriteError(f"{target} holds only rows of actions, and {fact}; write a .json file instead") from None
    if (inferred.placement, inferred.microbatches) != (schedule.placement, schedule.microbatches):
        lost = "placement" if inferred.placement != schedule.placement else f"{schedule.microbatches} microbatches"
        raise WriteError(
            f"{target} holds only rows of actions, which do not determine the {lost}; write a .json file instead"
        )


#: Each stage of a complete schedule runs each of these once per microbatch.
_ONCE: Final = {
    "forward": (FORWARD,),
    "backward": (FULL_BACKWARD, BACKWARD_INPUT),
    "weight gradient": (FULL_BACKWARD, BACKWARD_WEIGHT),
}


def check_not_truncated(schedule: Schedule, text: str) -> None:
    """Refuse text whose last line has no line break, unless every stage runs each microbatch exactly once.

    (A truncated ``1B12`` may look like ``1B1``.) For a lowered schedule, this cannot be decided.
    """
    if text.endswith(("\n", "\r")):
        return
    row, advice = text.count("\n") + 1, "if it is complete, add a line break"
    if schedule.lowered:
        raise FormatError(f"may be truncated: its last row has no line break; {advice}", row=row)
    for noun, kinds in _ONCE.items():
        chosen = schedule.codes[np.isin(packed.types(schedule.codes), [packed.TYPE_NUMBER[kind] for kind in kinds])]
        stages, microbatches = packed.stages(chosen), packed.microbatches(chosen)
        counts = np.bincount(stages, minlength=schedule.stages)
        least, most = counts.argmin(), counts.argmax()
        reason = ""
        if counts[least] < counts[most]:
            reason = f"stage {least} has {counts[least]} {noun}s while stage {most} has {counts[most]}"
        elif len(np.unique(packed.pack(stages, FORWARD, microbatches))) < len(chosen):
            reason = f"a stage has the {noun} of a microbatch twice"
        if reason:
            raise FormatError(f"seems to be truncated: its last row has no line break, and {reason}; {advice}", row=row)
