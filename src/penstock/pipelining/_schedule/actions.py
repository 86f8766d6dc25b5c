"""Actions as ``torch.distributed.pipelining`` has them: ours, made without a check."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self, cast

from penstock.errors import ScheduleSyntaxError
from penstock.ir.actions import NO_STAGE, Action, ComputationType

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_ComputationType = ComputationType

_action_regex: Final = re.compile(
    r"(\d+)(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)", re.ASCII
)
_several_regex: Final = re.compile(r"\(([^()]*)\)(.*)")


class ActionTextError(ScheduleSyntaxError, RuntimeError):
    """A text that is not an action; a ``RuntimeError`` too, as upstream's is."""


class _Action(Action):
    """One step of one rank: a named tuple of stage, type, microbatch and sub-actions.

    >>> _Action(2, _ComputationType.FORWARD, 0)
    2F0
    >>> _Action.from_str("3SEND_F1").computation_type.name
    'SEND_F'

    Any fields will do, as upstream; whether they go together is found where they are used.
    """

    __slots__ = ()

    def __new__(
        cls,
        stage_index: int,
        computation_type: _ComputationType,
        microbatch_index: int | None = None,
        sub_actions: tuple[_Action, ...] | None = None,
    ) -> Self:
        return tuple.__new__(cls, (stage_index, computation_type, microbatch_index, sub_actions))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # as in Action
        return cls(*iterable)

    @property
    def parts(self) -> tuple[_Action, ...]:
        """The actions that run: the sub-actions of an overlap, else the action itself."""
        return (self,) if self.sub_actions is None else cast("tuple[_Action, ...]", self.sub_actions)

    @property
    def is_compute_op(self) -> bool:
        """Whether it is a forward, a backward or an overlap of them."""
        return self.is_compute

    @staticmethod
    def from_str(action_string: str) -> _Action | None:  # type: ignore[override]  # an empty cell is None here
        """Parse ``repr(action)``; an empty text is an idle step, None."""
        content = action_string.strip()
        if not content:
            return None
        if found := _action_regex.fullmatch(content):
            stage, kind, microbatch = found.groups()
            return _Action(int(stage), _ComputationType(kind), int(microbatch) if microbatch else None)
        if found := _several_regex.fullmatch(content):
            parts = [_Action.from_str(part) for part in found.group(1).split(";")]
            actions = tuple(part for part in parts if part is not None)
            return _Action(NO_STAGE, _ComputationType.from_str(found.group(2)), None, actions or None)
        raise ActionTextError(
            f"{content!r} is not an action; write [stage][type][microbatch], e.g. '2F0', '3SEND_F1' or '1UNSHARD'",
            text=action_string,
        )


class _PeerAction(_Action):
    """A transfer to or from a stage that is not the next one.

    >>> _PeerAction(0, _ComputationType.SEND_F, 1, 3)
    0SEND_F1@3
    """

    __slots__ = ()

    def __new__(
        cls, stage_index: int, computation_type: _ComputationType, microbatch_index: int | None, peer_index: int
    ) -> Self:
        return tuple.__new__(cls, (stage_index, computation_type, microbatch_index, None, peer_index))


@lru_cache
def _get_profiler_function_name(action: _Action) -> str:
    """Get what a profiler shows for an action."""
    return f"PP:{action}"
