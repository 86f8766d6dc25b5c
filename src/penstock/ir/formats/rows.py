"""What the formats have in common that hold rows of cells."""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.errors import FormatError, PenstockError, WriteError
from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.ir.schedule import Schedule


def check_rows_suffice(schedule: Schedule, target: str) -> None:
    """Refuse to drop what the rows of actions alone do not say."""
    try:
        alone = Schedule.from_codes([schedule.codes_of(rank) for rank in range(schedule.ranks)])
    except PenstockError as fact:
        raise WriteError(f"{target} holds rows of actions only, and {fact}; write it as .json") from None
    if alone != schedule:
        lost = "placement" if alone.placement != schedule.placement else f"{schedule.microbatches} microbatches"
        raise WriteError(f"{target} holds rows of actions only, and they do not tell the {lost}; write it as .json")


#: Each stage of a whole schedule does each of these once for every microbatch.
_ONCE: Final = {
    "forward": (FORWARD,),
    "backward": (FULL_BACKWARD, BACKWARD_INPUT),
    "weight gradient": (FULL_BACKWARD, BACKWARD_WEIGHT),
}


def check_not_truncated(schedule: Schedule, text: str) -> None:
    """A text whose last line does not end is whole only if every stage has done as much as the others, each once.

    (What is left of a cut ``1B12`` may be ``1B1``.) Of a lowered schedule that cannot be told.
    """
    if text.endswith(("\n", "\r")):
        return
    row, advice = text.count("\n") + 1, "if it is whole, add a line break"
    if schedule.lowered:
        raise FormatError(f"may be cut off: its last row does not end; {advice}", row=row)
    for noun, kinds in _ONCE.items():
        chosen = schedule.codes[np.isin(packed.types(schedule.codes), [packed.TYPE_NUMBER[kind] for kind in kinds])]
        stages, microbatches = packed.stages(chosen), packed.microbatches(chosen)
        counts = np.bincount(stages, minlength=schedule.stages)
        least, most = counts.argmin(), counts.argmax()
        reason = ""
        if counts[least] < counts[most]:
            reason = f"stage {least} has {counts[least]} {noun}s where stage {most} has {counts[most]}"
        elif len(np.unique(packed.pack(stages, FORWARD, microbatches))) < len(chosen):
            reason = f"a stage has the {noun} of one microbatch twice"
        if reason:
            raise FormatError(f"seems cut off: its last row does not end, and {reason}; {advice}", row=row)
