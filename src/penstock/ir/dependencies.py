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
    from collections.abc import Iterable, Mapping

    from penstock.ir.actions import ComputationType
    from penstock.ir.edges import Link


class Need(NamedTuple):
    """An input that an action waits for, on the same microbatch: one from each stage that provides it.

    Attributes:
        stage_offset: which stages provide it: 0 is the stage of the action, -1 the sources of the links to it, +1 the
            targets of those links from it that have a gradient. In a chain, this is the stage relative to its own.
        any_of: the types of action that provide it; any one of them is enough.
    """

    stage_offset: int
    any_of: tuple[ComputationType, ...]


_ACTIVATION: Final = Need(-1, (FORWARD,))
_OWN_FORWARD: Final = Need(0, (FORWARD,))
_GRADIENT: Final = Need(+1, (FULL_BACKWARD, BACKWARD_INPUT))
_OWN_INPUT_GRADIENT: Final = Need(0, (BACKWARD_INPUT,))

#: What each type of compute action waits for. In a chain, the first stage needs no activation, the last no gradient.
NEEDS: Final[Mapping[ComputationType, tuple[Need, ...]]] = MappingProxyType(
    {
        FORWARD: (_ACTIVATION,),
        FULL_BACKWARD: (_OWN_FORWARD, _GRADIENT),
        BACKWARD_INPUT: (_OWN_FORWARD, _GRADIENT),
        BACKWARD_WEIGHT: (_OWN_INPUT_GRADIENT,),
    }
)


class Transfer(NamedTuple):
    """How the output of a stage gets to a stage on another rank.

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

    @property
    def distance(self) -> int:
        """How many stages apart the two are; 1 in a chain."""
        return abs(self.stage_offset)

    @property
    def is_backward(self) -> bool:
        """Whether it carries gradients."""
        return self.stage_offset < 0

    def over(self, distance: int) -> Transfer:
        """Return the same transfer between stages that are this far apart."""
        return self._replace(stage_offset=-distance if self.is_backward else distance)


#: In a chain, activations go to the next stage, gradients to the previous one.
TRANSFERS: Final = (
    Transfer(SEND_F, RECV_F, +1, _ACTIVATION.any_of, (FORWARD,)),
    Transfer(SEND_B, RECV_B, -1, _GRADIENT.any_of, (FULL_BACKWARD, BACKWARD_INPUT)),
)

#: The types of action that send or receive.
TRANSFER_TYPES: Final = tuple(kind for transfer in TRANSFERS for kind in (transfer.send, transfer.receive))


class Neighbours(NamedTuple):
    """The stages that each stage gets its inputs from.

    Attributes:
        sources: for each stage, those whose values it takes.
        targets: for each stage, those that send it gradients.
    """

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, links: Iterable[Link], stages: int) -> Neighbours:
        """Return the neighbours of every stage over these links.

        >>> from penstock.ir.edges import Edge, links
        >>> Neighbours.over(links([Edge(0, (1, 2)), Edge(1, (2,), gradient=False)]), stages=3)
        Neighbours(sources=((), (0,), (0, 1)), targets=((1, 2), (), ()))
        """
        sources: list[list[int]] = [[] for _ in range(stages)]
        targets: list[list[int]] = [[] for _ in range(stages)]
        for link in links:
            sources[link.target].append(link.source)
            if link.gradient:
                targets[link.source].append(link.target)
        return cls(tuple(map(tuple, sources)), tuple(map(tuple, targets)))

    def providers(self, stage: int, need: Need) -> tuple[int, ...]:
        """Return the stages that provide what an action of this stage needs; none if the stage does not exist."""
        if stage >= len(self.sources):
            return ()
        if need.stage_offset == 0:
            return (stage,)
        return (self.sources if need.stage_offset < 0 else self.targets)[stage]


def needs(action: Action, stages: int | Neighbours) -> list[tuple[Action, ...]]:
    """Return what a compute action waits for in a chain of ``stages`` stages: one action of each tuple.

    >>> needs(Action.from_str("2B0"), stages=4)
    [(2F0,), (3B0, 3I0)]
    >>> needs(Action.from_str("3I0"), stages=4)
    [(3F0,)]

    An overlap waits for everything that its sub-actions wait for; they run together, so none can wait for another.

    >>> needs(Action.from_str("(1F5;2B3)OVERLAP_F_B"), stages=4)
    [(0F5,), (2F3,), (3B3, 3I3)]

    Stages that are not a chain are given by their neighbours.

    >>> from penstock.ir.edges import Edge, links
    >>> needs(Action.from_str("2F0"), Neighbours.over(links([Edge(0, (1, 2)), Edge(1, (2,))]), stages=3))
    [(0F0,), (1F0,)]
    """
    return [
        # Without the checks of the constructor: the fields come from an action, and this runs for all of a schedule.
        tuple(tuple.__new__(Action, (stage, kind, part.microbatch_index, None)) for kind in need.any_of)
        for part in action.parts
        for need in NEEDS.get(part.computation_type, ())
        for stage in _providers(part.stage_index, need, stages)
    ]


def _providers(stage: int, need: Need, stages: int | Neighbours) -> tuple[int, ...]:
    if isinstance(stages, Neighbours):
        return stages.providers(stage, need)
    other = stage + need.stage_offset
    return (other,) if 0 <= other < stages else ()
