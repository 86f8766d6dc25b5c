"""Defines what a rank can do in one step: the twelve types of action, and their text form.

An action is written ``[stage][type][microbatch]``: ``2F0`` is the forward of stage 2 on microbatch 0. Sharding
actions have no microbatch (``2UNSHARD``), and an overlap lists the actions that run together:
``(2F5;7B3)OVERLAP_F_B``. A transfer to or from a stage other than the next or the previous one names that stage:
``0SEND_F0@3``.
"""

from __future__ import annotations

import re
from enum import StrEnum
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, SupportsIndex, cast

from penstock.errors import ActionError, ScheduleSyntaxError

if TYPE_CHECKING:
    from collections.abc import Iterable


class ComputationType(StrEnum):
    """The types of action; the value is the type's name in an action's text form."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"

    __hash__ = str.__hash__  # a member equals its value and must hash like it; also faster than Enum's

    @staticmethod
    def from_str(action: str) -> ComputationType:
        """Return the type with this name.

        Raises:
            ActionError: the type is unknown; also a ``RuntimeError``, as in PyTorch.
        """
        try:
            return ComputationType(action)
        except ValueError:
            known = ", ".join(ComputationType)
            raise _UnknownTypeError(f"{action!r} is not a computation type; expected one of {known}") from None


class _UnknownTypeError(ActionError, RuntimeError):
    """The computation type is unknown."""


FORWARD: Final = ComputationType.FORWARD
BACKWARD_INPUT: Final = ComputationType.BACKWARD_INPUT
BACKWARD_WEIGHT: Final = ComputationType.BACKWARD_WEIGHT
UNSHARD: Final = ComputationType.UNSHARD
RESHARD: Final = ComputationType.RESHARD
SEND_F: Final = ComputationType.SEND_F
RECV_F: Final = ComputationType.RECV_F
SEND_B: Final = ComputationType.SEND_B
RECV_B: Final = ComputationType.RECV_B
FULL_BACKWARD: Final = ComputationType.FULL_BACKWARD
OVERLAP_F_B: Final = ComputationType.OVERLAP_F_B
REDUCE_GRAD: Final = ComputationType.REDUCE_GRAD

#: Work on one stage and one microbatch: what an overlap may contain.
COMPUTE: Final = frozenset({FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
#: Work on the parameters of a stage: the only types without a microbatch.
SHARDING: Final = frozenset({UNSHARD, RESHARD, REDUCE_GRAD})

#: Transfers, and on which side of its own stage the stage is that each exchanges with.
PEER_SIDE: Final = MappingProxyType({SEND_F: +1, RECV_F: -1, SEND_B: -1, RECV_B: +1})

#: The largest stage, the largest microbatch, and how far apart two stages can exchange; an action fits into 64 bits.
LARGEST_STAGE: Final = 2**15 - 1
LARGEST_MICROBATCH: Final = 2**28 - 1
LONGEST_HOP: Final = 2**14

#: The stage index of an overlap, which has no single stage.
NO_STAGE: Final = -1


class _Fields(NamedTuple):
    stage_index: int
    computation_type: ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[Action, ...] | None = None


class Action(_Fields):
    """One step of one rank: an immutable, hashable value whose text form is ``str(action)``.

    >>> Action(2, ComputationType.FORWARD, 0)
    2F0
    >>> Action.from_str("3SEND_F1").computation_type
    <ComputationType.SEND_F: 'SEND_F'>
    >>> Action.overlap(Action(2, FORWARD, 5), Action(7, FULL_BACKWARD, 3))
    (2F5;7B3)OVERLAP_F_B
    >>> Action(0, SEND_F, 0, peer_index=3)
    0SEND_F0@3

    It is a tuple of four, and of five only if it has a ``peer_index``.
    """

    __slots__ = ()

    def __new__(
        cls,
        stage_index: SupportsIndex,
        computation_type: ComputationType | str,
        microbatch_index: SupportsIndex | None = None,
        sub_actions: tuple[Action, ...] | None = None,
        peer_index: SupportsIndex | None = None,
    ) -> Self:
        """Check that the fields are consistent, or raise ``ActionError``."""
        kind = ComputationType.from_str(computation_type)
        if peer_index is not None and kind not in PEER_SIDE:
            raise ActionError(f"only {', '.join(PEER_SIDE)} exchange with a peer; a {kind} action got {peer_index!r}")
        if kind is OVERLAP_F_B:
            if microbatch_index is not None:
                raise ActionError(f"an overlap takes no microbatch_index, got {microbatch_index!r}")
            return super().__new__(cls, NO_STAGE, kind, None, _checked_overlap(stage_index, sub_actions))
        if sub_actions is not None:
            raise ActionError(f"only {OVERLAP_F_B} takes sub_actions; a {kind} action got {sub_actions!r}")
        stage = _checked_index("stage_index", stage_index, LARGEST_STAGE)
        if kind in SHARDING:
            if microbatch_index is not None:
                raise ActionError(f"{kind} takes no microbatch, got {microbatch_index!r}; write '{stage}{kind}'")
            return super().__new__(cls, stage, kind, None, None)
        if microbatch_index is None:
            raise ActionError(f"{kind} needs a microbatch; write e.g. '{stage}{kind}0'")
        microbatch = _checked_index("microbatch_index", microbatch_index, LARGEST_MICROBATCH)
        if peer_index is None:
            return super().__new__(cls, stage, kind, microbatch, None)
        return tuple.__new__(cls, (stage, kind, microbatch, None, _checked_peer(stage, kind, microbatch, peer_index)))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # typeshed names cls differently
        """Build from an iterable, with the same checks."""
        return cls(*iterable)

    def _replace(self, /, **changes: Any) -> Self:
        """Return the action with some fields changed, checked like a new one."""
        if self.peer_index is not None:
            changes.setdefault("peer_index", self.peer_index)
        peer = {"peer_index": changes.pop("peer_index")} if "peer_index" in changes else {}
        replaced = super()._replace(**changes)
        return type(self)(*replaced, **peer) if peer else replaced

    @classmethod
    def overlap(cls, *sub_actions: Action) -> Self:
        """Return the action that runs these compute actions together."""
        return cls(NO_STAGE, OVERLAP_F_B, None, sub_actions)

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Parse the text form, the inverse of ``str(action)``; surrounding spaces are allowed.

        >>> Action.from_str(" 2F0 ")
        2F0
        >>> Action.from_str("2F0garbage")
        Traceback (most recent call last):
        ...
        penstock.errors.ScheduleSyntaxError: '2F0garbage' is not an action; write e.g. '2F0' or '3SEND_F1'
        """
        if not isinstance(text, str):
            raise ScheduleSyntaxError(f"expected the text of an action, e.g. '2F0', got {text!r}", text=repr(text))
        action = parse_cell(text)
        if action is None:
            raise ScheduleSyntaxError("empty text is not an action; write e.g. '2F0'", text=text)
        return cast("Self", action)

    @property
    def peer_index(self) -> int | None:
        """The stage that a transfer goes to or comes from; None for the next or previous one, and for other actions."""
        fields: tuple[Any, ...] = self
        return fields[4] if len(fields) > 4 else None

    @property
    def is_compute(self) -> bool:
        """Whether it is a forward, a backward or an overlap of them."""
        return self.computation_type in COMPUTE or self.computation_type is OVERLAP_F_B

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions that it runs: the sub-actions of an overlap, otherwise the action itself."""
        return (self,) if self.sub_actions is None else self.sub_actions

    def __str__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){self.computation_type.value}"
        microbatch = "" if self.microbatch_index is None else self.microbatch_index
        peer = "" if self.peer_index is None else f"@{self.peer_index}"
        return f"{self.stage_index}{self.computation_type.value}{microbatch}{peer}"

    __repr__ = __str__


def _checked_index(field: str, value: SupportsIndex, largest: int) -> int:
    try:
        number = index(value)
    except TypeError:
        raise ActionError(f"{field} must be an integer, got {value!r}") from None
    if not 0 <= number <= largest:
        raise ActionError(f"{field} must be between 0 and {largest}, got {number}")
    return number


_ROUTE: Final = {SEND_F: "to a later", RECV_F: "from an earlier", SEND_B: "to an earlier", RECV_B: "from a later"}


def _checked_peer(stage: int, kind: ComputationType, microbatch: int, value: SupportsIndex) -> int:
    peer = _checked_index("peer_index", value, LARGEST_STAGE)
    distance = (peer - stage) * PEER_SIDE[kind]
    if distance == 1:
        raise ActionError(
            f"stage {peer} is next to stage {stage} and needs no '@{peer}'; write '{stage}{kind}{microbatch}'"
        )
    if distance < 1:
        raise ActionError(f"{kind} goes {_ROUTE[kind]} stage than its own, stage {stage}; stage {peer} is not one")
    if distance > LONGEST_HOP:
        raise ActionError(f"stages {stage} and {peer} are {distance} stages apart; at most {LONGEST_HOP} are possible")
    return peer


def _checked_overlap(stage_index: SupportsIndex, sub_actions: object) -> tuple[Action, ...]:
    if not isinstance(stage_index, int) or stage_index != NO_STAGE:
        raise ActionError(f"the stage_index of an overlap must be {NO_STAGE}, got {stage_index!r}")
    if not isinstance(sub_actions, tuple) or len(sub_actions) < 2:
        raise ActionError(f"an overlap needs a tuple of two or more sub_actions, got {sub_actions!r}")
    for action in sub_actions:
        if not isinstance(action, Action) or action.computation_type not in COMPUTE:
            raise ActionError(f"an overlap can only contain F, B, I and W actions, got {action!r}")
    return sub_actions


_INDEX: Final = "(0|[1-9][0-9]*)"
_PLAIN: Final = "|".join(t for t in ComputationType if t is not OVERLAP_F_B)
_ACTION: Final = re.compile(f"{_INDEX}({_PLAIN}){_INDEX}?(?:@{_INDEX})?")
_OVERLAP: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def parse_cell(text: str, *, row: int | None = None, cell: int | None = None) -> Action | None:
    """Parse a cell; return None if it is empty, which is an idle step.

    >>> parse_cell("2UNSHARD"), parse_cell("  ")
    (2UNSHARD, None)

    Args:
        text: the content of the cell.
        row: the number of the row, for error messages.
        cell: the number of the cell in the row, for error messages.
    """
    content = text.strip(" \t")
    if not content:
        return None
    reason = ""
    try:
        if (action := _matched(content)) is not None:
            return action
    except ActionError as fact:
        reason = f": {fact}"
    hint = "" if "; write" in reason else f"; write e.g. {_hint(content)}"
    message = f"{_shortened(content)} is not an action{reason}{hint}"
    raise ScheduleSyntaxError(message, text=text, row=row, cell=cell)


def _hint(content: str) -> str:
    """Suggest a valid form close to what was written."""
    if content in (".", "-", "..", "None"):
        return "'2F0', and leave the cell empty for an idle step"
    if content.startswith("(") or "OVERLAP" in content:
        return "'(2F5;7B3)OVERLAP_F_B'"
    if ";" in content or "\t" in content:
        return "'2F0', and separate cells with commas"
    if content != content.upper() and _ACTION.fullmatch(content.upper()):
        return f"'{content.upper()}'"
    return "'2F0' or '3SEND_F1'"


def _matched(content: str) -> Action | None:
    if found := _ACTION.fullmatch(content):
        stage, kind, microbatch, peer = found.groups()
        numbers = [None if digits is None else _parsed_index(digits) for digits in (microbatch, peer)]
        return Action(_parsed_index(stage), kind, numbers[0], None, numbers[1])
    if found := _OVERLAP.fullmatch(content):
        parts = [_matched(part) for part in found.group(1).split(";") if _ACTION.fullmatch(part)]
        if len(parts) == found.group(1).count(";") + 1:
            return Action.overlap(*(part for part in parts if part is not None))
    return None


def _parsed_index(digits: str) -> int:
    if len(digits) > len(str(LARGEST_MICROBATCH)):  # int() rejects thousands of digits with a different error
        raise ActionError(f"stages go from 0 to {LARGEST_STAGE}, microbatches from 0 to {LARGEST_MICROBATCH}")
    return int(digits)


def _shortened(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:37] + "...")
