"""What a rank can do in one step: the twelve kinds of action, and their text form.

An action is written ``[stage][type][microbatch]``: ``2F0`` is the forward of stage 2 on microbatch 0. Sharding
actions have no microbatch (``2UNSHARD``), and an overlap lists what runs together: ``(2F5;7B3)OVERLAP_F_B``.
"""

from __future__ import annotations

import re
from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, SupportsIndex, cast

from penstock.errors import ActionError, ScheduleSyntaxError

if TYPE_CHECKING:
    from collections.abc import Iterable


class ComputationType(StrEnum):
    """The kinds of action; the value is what stands in an action's text form."""

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

    __hash__ = str.__hash__  # it equals its value, so it is found under its value; and it need not be computed

    @staticmethod
    def from_str(action: str) -> ComputationType:
        """The type that is written so.

        Raises:
            ActionError: there is no such type; it is a ``RuntimeError`` too, as PyTorch's is.
        """
        try:
            return ComputationType(action)
        except ValueError:
            known = ", ".join(ComputationType)
            raise _UnknownTypeError(f"{action!r} is not a computation type; there are {known}") from None


class _UnknownTypeError(ActionError, RuntimeError):
    """There is no such computation type."""


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

#: Work on one stage and one microbatch: what an overlap may hold.
COMPUTE: Final = frozenset({FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
#: Work on the parameters of a stage: the only types without a microbatch.
SHARDING: Final = frozenset({UNSHARD, RESHARD, REDUCE_GRAD})

#: Stages and microbatches are numbered from 0 up to this, so that an action fits into 64 bits.
LARGEST_INDEX: Final = 2**28 - 1

#: The stage index of an overlap, which has no stage of its own.
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
    """

    __slots__ = ()

    def __new__(
        cls,
        stage_index: SupportsIndex,
        computation_type: ComputationType | str,
        microbatch_index: SupportsIndex | None = None,
        sub_actions: tuple[Action, ...] | None = None,
    ) -> Self:
        """Check that the fields go together; ``ActionError`` says which do not."""
        kind = ComputationType.from_str(computation_type)
        if kind is OVERLAP_F_B:
            if microbatch_index is not None:
                raise ActionError(f"an overlap has no microbatch of its own: microbatch_index={microbatch_index!r}")
            return super().__new__(cls, NO_STAGE, kind, None, _checked_overlap(stage_index, sub_actions))
        if sub_actions is not None:
            raise ActionError(f"a {kind} action has no sub_actions, only {OVERLAP_F_B} has: {sub_actions!r}")
        stage = _checked_index("stage_index", stage_index)
        if kind in SHARDING:
            if microbatch_index is not None:
                raise ActionError(
                    f"{kind} belongs to a stage, not to microbatch {microbatch_index!r}; write '{stage}{kind}'"
                )
            return super().__new__(cls, stage, kind, None, None)
        if microbatch_index is None:
            raise ActionError(f"the type {kind} needs a microbatch; write e.g. '{stage}{kind}0'")
        return super().__new__(cls, stage, kind, _checked_index("microbatch_index", microbatch_index), None)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # typeshed names cls otherwise
        """Named tuples build from an iterable here, and ``_replace`` uses it: checked as well."""
        return cls(*iterable)

    @classmethod
    def overlap(cls, *sub_actions: Action) -> Self:
        """The action that runs these compute actions together."""
        return cls(NO_STAGE, OVERLAP_F_B, None, sub_actions)

    @classmethod
    def from_str(cls, text: str) -> Self:
        """The inverse of ``str(action)``; spaces around it are allowed, anything else is an error.

        >>> Action.from_str(" 2F0 ")
        2F0
        >>> Action.from_str("2F0garbage")
        Traceback (most recent call last):
        ...
        penstock.errors.ScheduleSyntaxError: '2F0garbage' is not an action; write e.g. '2F0' or '3SEND_F1'
        """
        if not isinstance(text, str):
            raise ScheduleSyntaxError(f"an action is written as text, e.g. '2F0', not {text!r}", text=repr(text))
        action = parse_cell(text)
        if action is None:
            raise ScheduleSyntaxError("an empty text is not an action; write e.g. '2F0'", text=text)
        return cast("Self", action)

    @property
    def is_compute(self) -> bool:
        """Whether it is a forward, a backward or an overlap of them."""
        return self.computation_type in COMPUTE or self.computation_type is OVERLAP_F_B

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions that run: the sub-actions of an overlap, else the action itself."""
        return (self,) if self.sub_actions is None else self.sub_actions

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The same, under its former name."""
        return self.parts

    def __str__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){self.computation_type.value}"
        microbatch = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{microbatch}"

    __repr__ = __str__


def _checked_index(field: str, value: SupportsIndex) -> int:
    try:
        number = index(value)
    except TypeError:
        raise ActionError(f"{field} must be a whole number, not {value!r}") from None
    if not 0 <= number <= LARGEST_INDEX:
        raise ActionError(f"{field} must be from 0 to {LARGEST_INDEX}, not {number}")
    return number


def _checked_overlap(stage_index: SupportsIndex, sub_actions: object) -> tuple[Action, ...]:
    if not isinstance(stage_index, int) or stage_index != NO_STAGE:
        raise ActionError(f"an overlap has no stage of its own: write {NO_STAGE}, not {stage_index!r}")
    if not isinstance(sub_actions, tuple) or len(sub_actions) < 2:
        raise ActionError(f"an overlap needs a tuple of two or more sub_actions, not {sub_actions!r}")
    for action in sub_actions:
        if not isinstance(action, Action) or action.computation_type not in COMPUTE:
            raise ActionError(f"an overlap is made of F, B, I and W actions, not of {action!r}")
    return sub_actions


_INDEX: Final = "(0|[1-9][0-9]*)"
_PLAIN: Final = "|".join(t for t in ComputationType if t is not OVERLAP_F_B)
_ACTION: Final = re.compile(f"{_INDEX}({_PLAIN}){_INDEX}?")
_OVERLAP: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def parse_cell(text: str, *, row: int | None = None, cell: int | None = None) -> Action | None:
    """The action that a cell holds, or None if it is empty: an idle step.

    >>> parse_cell("2UNSHARD"), parse_cell("  ")
    (2UNSHARD, None)

    Args:
        text: what stands there.
        row: where it stands, for the error.
        cell: the same.
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
    """A right form that is close to what was written."""
    if content in (".", "-", "..", "None"):
        return "'2F0', and leave the cell of an idle step empty"
    if content.startswith("(") or "OVERLAP" in content:
        return "'(2F5;7B3)OVERLAP_F_B'"
    if ";" in content or "\t" in content:
        return "'2F0', and put commas between cells"
    if content != content.upper() and _ACTION.fullmatch(content.upper()):
        return f"'{content.upper()}'"
    return "'2F0' or '3SEND_F1'"


def _matched(content: str) -> Action | None:
    if found := _ACTION.fullmatch(content):
        stage, kind, microbatch = found.groups()
        return Action(_parsed_index(stage), kind, _parsed_index(microbatch) if microbatch else None)
    if found := _OVERLAP.fullmatch(content):
        parts = [_matched(part) for part in found.group(1).split(";") if _ACTION.fullmatch(part)]
        if len(parts) == found.group(1).count(";") + 1:
            return Action.overlap(*(part for part in parts if part is not None))
    return None


def _parsed_index(digits: str) -> int:
    if len(digits) > len(str(LARGEST_INDEX)):  # int() itself refuses thousands of digits, in other words
        raise ActionError(f"stages and microbatches are numbered from 0 to {LARGEST_INDEX}")
    return int(digits)


def _shortened(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:37] + "...")
