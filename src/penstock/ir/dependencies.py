"""Defines what an action waits for: the only copy of this rule, used by everything that depends on order."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.ir.actions import ComputationType


class Need(NamedTuple):
    """One input that an action waits for, on the same microbatch.

    Attributes:
        stage_offset: the stage it comes from, relative to the stage of the action.
        any_of: the types of action that provide it; any one of them is enough.
    """

    stage_offset: int
    any_of: tuple[ComputationType, ...]


_ACTIVATION: Final = Need(-1, (FORWARD,))
_OWN_FORWARD: Final = Need(0, (FORWARD,))
_GRADIENT: Final = Need(+1, (FULL_BACKWARD, BACKWARD_INPUT))
_OWN_INPUT_GRADIENT: Final = Need(0, (BACKWARD_INPUT,))

#: What each type of compute action waits for. The first stage needs no activation, the last no gradient.
NEEDS: Final[Mapping[ComputationType, tuple[Need, ...]]] = MappingProxyType(
    {
        FORWARD: (_ACTIVATION,),
        FULL_BACKWARD: (_OWN_FORWARD, _GRADIENT),
        BACKWARD_INPUT: (_OWN_FORWARD, _GRADIENT),
        BACKWARD_WEIGHT: (_OWN_INPUT_GRADIENT,),
    }
)


class Transfer(NamedTuple):
    """How the output of a stage gets to a neighbouring stage on another rank.

    Attributes:
        send: the type of the send, on the stage that produces the tensor.
        receive: the type of the receive, on the stage that consumes it.
        stage_offset: the receiving stage, relative to the sending one.
        made_by: the types of action that produce it; any one of them.
        needed_by: the types of action that consume it; any one of them.
    """

    send: ComputationType
    receive: ComputationType
    stage_offset: int
    made_by: tuple[ComputationType, ...]
    needed_by: tuple[ComputationType, ...]


#: Activations go to the next stage, gradients to the previous one.
TRANSFERS: Final = (
    Transfer(SEND_F, RECV_F, +1, _ACTIVATION.any_of, (FORWARD,)),
    Transfer(SEND_B, RECV_B, -1, _GRADIENT.any_of, (FULL_BACKWARD, BACKWARD_INPUT)),
)

#: The types of action that send or receive.
TRANSFER_TYPES: Final = tuple(kind for transfer in TRANSFERS for kind in (transfer.send, transfer.receive))


def needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """Return what a compute action waits for in a pipeline of ``stages`` stages: one action of each tuple.

    >>> needs(Action.from_str("2B0"), stages=4)
    [(2F0,), (3B0, 3I0)]
    >>> needs(Action.from_str("3I0"), stages=4)
    [(3F0,)]

    An overlap waits for everything that its sub-actions wait for; they run together, so none can wait for another.

    >>> needs(Action.from_str("(1F5;2B3)OVERLAP_F_B"), stages=4)
    [(0F5,), (2F3,), (3B3, 3I3)]
    """
    return [
        # Without the checks of the constructor: the fields come from an action, and this runs for all of a schedule.
        tuple(
            tuple.__new__(Action, (part.stage_index + need.stage_offset, kind, part.microbatch_index, None))
            for kind in need.any_of
        )
        for part in action.parts
        for need in NEEDS.get(part.computation_type, ())
        if 0 <= part.stage_index + need.stage_offset < stages
    ]
