"""What stages have found out for a schedule: it is theirs again when another schedule has prepared them since."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The attributes of a stage that follow from the batch, and from whether there are backwards.
_PREPARED: Final = (
    "args_recv_info",
    "act_send_info",
    "grad_recv_info",
    "grad_send_info",
    "chunks",
    "_stage_meta",
    "_kinds",
    "_other_metas",
    "_inference_mode",
    "_shared_inputs",
    "_shared_outputs",
)
#: Where a stage has the mark of the preparation that it is in.
_MARK: Final = "_preparation"


class NegotiatedState:
    """The state in which the stages of a rank are when they have been prepared."""

    def __init__(self, stages: Sequence[Any] = ()) -> None:
        self._mark = object()  # stages refer to it, and so not to each other
        # A stand-in may have slots in place of attributes, and so nothing to restore.
        self._states = [(stage, _state(stage)) for stage in stages if hasattr(stage, "__dict__")]
        for stage, _ in self._states:
            vars(stage)[_MARK] = self._mark

    def restore(self) -> None:
        """Give stages that are prepared for another schedule the state that they had."""
        for stage, state in self._states:
            if vars(stage)[_MARK] is not self._mark:
                vars(stage).update({name: copy(value) for name, value in state.items()}, **{_MARK: self._mark})


def _state(stage: Any) -> dict[str, Any]:
    return {name: copy(value) for name, value in vars(stage).items() if name in _PREPARED}
